"""A made-up run whose store grows, with checkpoints and metrics beside it."""

import random
import shutil
from pathlib import Path

from rhymeflow.config import Config
from rhymeflow.config.load import dump_config
from rhymeflow.core.commands import Pull
from rhymeflow.core.events import VersionPublished
from rhymeflow.core.types import TrajectoryId
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.store.stores import finished, group, segment


class MadeUpRun:
    """A run in `path`; what happens in it depends on `seed` only."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        self.path, self.draw = path, random.Random(seed)
        self.version = self.num_groups = self.checkpoint = 0
        self.open: dict[int, int] = {}  # tokens of each group that has not ended
        self.trained: dict[int, int] = {}  # the group of each batch
        path.mkdir()
        (path / "config.yaml").write_text(dump_config(Config(run={"seed": seed})))
        self.begin(f"of {seed}", seed)

    def begin(self, started: str = "later", seed: int = 0) -> None:
        """An attempt."""
        self.store = SqliteTrajectoryStore(self.path / "events.db")
        config = Config(run={"seed": seed}).model_dump_json()
        self.store.begin_attempt(config, now=0.0, started=started)
        self.store.commit()

    def go_on(self, num_commits: int, *, prunes: bool = False, keep: int = 0, tokens: int = 0):
        """`prunes`: but for the last `keep` batches and the last so many tokens."""
        for _ in range(num_commits):
            self._generate()
            if self.draw.random() < 0.5:
                self._train()
            if self.draw.random() < 0.3:
                self.save()
            before = min(self.checkpoint, self.version - keep)
            if prunes and before > 0:
                self.store.prune(before=before, history_tokens=tokens)
            self.store.commit()

    def _generate(self) -> None:
        store = self.store
        group(store, self.num_groups)
        self.open[self.num_groups] = 0
        self.num_groups += 1
        for number, start in self.open.items():
            tokens = [self.draw.randrange(100) for _ in range(self.draw.randint(1, 5))]
            version = self.draw.randint(max(self.version - 1, 0), self.version)
            segment(store, (number, 0), tokens, start=start, version=version)
            self.open[number] += len(tokens)
        number = store.record(self.draw.random(), [VersionPublished(self.version, "a")])
        store.record_command(number, Pull("rollout-0", number, self.version))
        group(store, -self.num_groups, suite="s", version=self.version)

    def _train(self) -> None:
        if self.draw.random() < 0.2:
            dropped = self.draw.choice(list(self.open))
            del self.open[dropped]
            self.store.put_ending(dropped, "aborted", version=self.version, reason="why not")
            return
        number = self.trained[self.version] = self.draw.choice(list(self.open))
        length, which = self.open.pop(number), TrajectoryId(number, 0)
        finished(self.store, which, length, self.draw.random(), text=f"text {number}", f=1.0)
        self.store.put_token_details(which, None, bytes(length))
        self.store.put_consumed(number, version=self.version, members=[0])
        self.version += 1
        self.store.record(self.draw.random(), [VersionPublished(self.version, "a")])
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {self.version}}}\n')

    def step(self) -> None:
        """One more, with a checkpoint."""
        before = self.version
        while self.version == before:
            self._generate()
            self._train()
        self.store.commit()
        self.save()

    def save(self) -> None:
        folder = self.path / "checkpoints" / f"step-{self.version}"
        if folder.exists() or not self.version:
            return
        self.store.put_snapshot(self.store._last_seq, b"state" + bytes([self.version % 250]))
        self.store.commit()
        unfinished = folder.with_name("new.unfinished")
        (unfinished / "deep").mkdir(parents=True)
        (unfinished / "model").write_bytes(self.draw.randbytes(1000))
        (unfinished / "deep" / "learner.pt").write_bytes(self.draw.randbytes(10))
        unfinished.rename(folder)
        for old in sorted(folder.parent.iterdir(), key=lambda p: int(p.name[5:]))[:-2]:
            shutil.rmtree(old)
        self.checkpoint = self.version
