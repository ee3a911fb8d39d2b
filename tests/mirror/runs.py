"""A made-up run whose store grows at random, and what its mirror is compared by."""

from __future__ import annotations

import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from rhymeflow.config import Config
from rhymeflow.config.load import dump_config
from rhymeflow.core.commands import Pull
from rhymeflow.core.events import VersionPublished
from rhymeflow.core.types import TrajectoryId
from rhymeflow.mirror.remote import Remote
from rhymeflow.mirror.shipper import Shipper
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.store.stores import answered

TABLES = (
    *("events", "commands", "attempts", "groups", "trajectories", "token_details", "pruned"),
    "changes",
)


class MadeUpRun:
    """A run in `path`; what happens in it depends on `seed` only."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        self.path, self.draw = path, random.Random(seed)
        self.version = self.num_groups = self.checkpoint = 0
        self.open: dict[int, int] = {}
        path.mkdir()
        config = Config(run={"seed": seed})
        (path / "config.yaml").write_text(dump_config(config))
        self.store = SqliteTrajectoryStore(path / "events.db")
        self.store.begin_attempt(config.model_dump_json(), now=0.0, started=f"of {seed}")
        self.store.commit()

    def resume(self) -> None:
        """Another attempt."""
        self.store.close()
        self.store = SqliteTrajectoryStore(self.path / "events.db")
        self.store.begin_attempt(Config().model_dump_json(), now=0.0, started="later")
        self.store.commit()

    def go_on(self, num_commits: int, *, prunes: bool = False) -> None:
        for _ in range(num_commits):
            self._generate()
            if self.draw.random() < 0.5:
                self._train()
            if self.draw.random() < 0.3:
                self._save()
            if prunes and self.checkpoint:
                self.store.prune(before=self.checkpoint, history_tokens=0)
            self.store.commit()

    def close(self) -> None:
        self.store.close()

    def _generate(self) -> None:
        store, group = self.store, self.num_groups
        self.num_groups += 1
        self.open[group] = 0
        store.put_group(group, row=group, epoch=0, prompt="p", prompt_tokens=[1], columns={})
        for group in self.open:
            tokens = [self.draw.randrange(100) for _ in range(self.draw.randint(1, 5))]
            store.put_segment(
                TrajectoryId(group, 0), start=self.open[group], version=self.version,
                instance="rollout-0", steps=1, drafted=0, tokens=tokens,
                logprobs=[0.5] * len(tokens), accepted=None,
            )  # fmt: skip
            self.open[group] += len(tokens)
        number = store.record(self.draw.random(), [VersionPublished(self.version, "a")])
        store.record_command(number, Pull("rollout-0", number, self.version))
        rewards = [self.draw.random() for _ in range(2)]
        answered(store, -self.num_groups, rewards, version=self.version)

    def _train(self) -> None:
        group = self.draw.choice(list(self.open))
        length, trajectory = self.open.pop(group), TrajectoryId(group, 0)
        self.store.put_finished(trajectory, length=length, reason="stop")
        self.store.put_text(trajectory, f"text {group}")
        self.store.put_reward(trajectory, reward=self.draw.random(), components={"f": 1.0})
        self.store.put_token_details(trajectory, None, bytes(length))
        self.store.put_consumed(group, version=self.version, members=[0])
        self.version += 1
        self.store.record(self.draw.random(), [VersionPublished(self.version, "a")])

    def _save(self) -> None:
        folder = self.path / "checkpoints" / f"step-{self.version}"
        if folder.exists() or not self.version:
            return
        (folder / "deep").mkdir(parents=True)
        (folder / "model").write_bytes(self.draw.randbytes(1000))
        (folder / "deep" / "learner.pt").write_bytes(self.draw.randbytes(10))
        for old in sorted(folder.parent.iterdir(), key=lambda p: int(p.name[5:]))[:-2]:
            shutil.rmtree(old)
        self.store.put_snapshot(self.store._last_seq, b"state" + bytes([self.version % 250]))
        self.store.commit()
        self.checkpoint = self.version


def content(path: Path) -> dict[str, list]:
    """All that is in a store, but its `meta` and snapshots."""
    with closing(sqlite3.connect(path / "events.db")) as db:
        found = {t: sorted(db.execute(f"SELECT * FROM {t}"), key=repr) for t in TABLES}
        found["segments"] = sorted(db.execute("SELECT rowid, * FROM segments"))
        pruned = "SELECT value FROM meta WHERE key = 'pruned_before'"
        found["meta"] = [row for row in db.execute(pruned) if row[0]]
        return found


def ship(run: MadeUpRun, url: str) -> bool:
    """Copy all that is new, checkpoints too, as an attempt of its own."""
    shipper = Shipper(run.path, Remote(url))
    try:
        return ship_all(shipper)
    finally:
        shipper.close()


def ship_all(shipper: Shipper) -> bool:
    """Until nothing is left."""
    for _ in range(200):
        if shipper.ship():
            return True
        if shipper._trees._copying is not None:
            shipper._trees._copying[1].exception(timeout=10)
    return False
