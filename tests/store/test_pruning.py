"""Pruning: what a run may still read is what it would be without, and the rest goes."""

from __future__ import annotations

import random
import tempfile
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.core.events import VersionPublished
from rhymeflow.core.types import TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.store import pruning
from rhymeflow.store.follow import Follower
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.store.stores import prompt_of, put

MEMBERS = 2
TOTALS = """SELECT group_id, member, SUM(length), MIN(version), MAX(version), SUM(steps)
    FROM spans GROUP BY 1, 2 ORDER BY 1, 2"""


class Step(NamedTuple):
    """What happens until the next commit."""

    kind: str
    seed: int


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(["generate", "generate", "train", "drop", "save", "prune", "reopen"]),
        st.integers(0, 2**16),
    ),
    max_size=40,
)


class Twins:
    """Two stores of one made-up run; the second one is pruned."""

    def __init__(self, folder: Path, history_tokens: int, keep: int) -> None:
        self.paths = [folder / "all.db", folder / "some.db"]
        for path in self.paths:
            path.parent.joinpath(path.stem).mkdir()
        self.paths = [path.parent / path.stem / "events.db" for path in self.paths]
        self.stores = [SqliteTrajectoryStore(path) for path in self.paths]
        self.history_tokens, self.keep = history_tokens, keep
        self.version = self.checkpoint = self.num_groups = 0
        self.lengths: dict[int, list[int]] = {}
        """Tokens of each member of groups in flight."""
        self.batches: dict[int, list[int]] = {}

    def both(self, name: str, *args, **options) -> None:
        for store in self.stores:
            getattr(store, name)(*args, **options)

    def take(self, step: Step) -> None:
        draw = random.Random(step.seed)
        getattr(self, f"_{step.kind}")(draw)
        self.both("commit")

    def _generate(self, draw: random.Random) -> None:
        if len(self.lengths) < 4:
            self.lengths[self.num_groups] = [0] * MEMBERS
            self.both("put_group", self.num_groups, row=0, epoch=0, prompt="p",
                prompt_tokens=prompt_of(self.num_groups), columns={})  # fmt: skip
            self.num_groups += 1
        for group, lengths in self.lengths.items():
            for member in range(MEMBERS):
                count = draw.randrange(4)
                if not count:
                    continue
                one, start = TrajectoryId(group, member), lengths[member]
                version = draw.randint(max(self.version - 1, 0), self.version)
                tokens = list(range(start, start + count))
                for store in self.stores:
                    put(store, one, start, tokens, version=version)
                lengths[member] += count

    def _train(self, draw: random.Random) -> None:
        ready = [group for group, lengths in self.lengths.items() if all(lengths)]
        chosen = ready[: draw.randint(1, 2)]
        for group in chosen:
            for member, length in enumerate(self.lengths.pop(group)):
                trajectory = TrajectoryId(group, member)
                self.both("put_finished", trajectory, length=length, reason="stop")
                self.both("put_text", trajectory, "text")
                self.both("put_reward", trajectory, reward=1.0, components={})
                self.both("put_token_details", trajectory, None, bytes(length))
            self.both("put_consumed", group, version=self.version, members=[*range(MEMBERS)])
        self.batches[self.version] = chosen
        self.version += 1
        self.both("record", 0.0, [VersionPublished(self.version)])

    def _drop(self, draw: random.Random) -> None:
        if self.lengths:
            group = draw.choice(list(self.lengths))
            del self.lengths[group]
            self.both("put_ending", group, "aborted", version=self.version, reason="why not")

    def _save(self, draw: random.Random) -> None:
        self.checkpoint = self.version

    def _prune(self, draw: random.Random) -> None:
        before = min(self.checkpoint, self.version - self.keep)
        if before > 0:
            self.stores[1].prune(before=before, history_tokens=self.history_tokens)

    def _reopen(self, draw: random.Random) -> None:
        """As after a crash: what was not committed is not there."""
        for number, store in enumerate(self.stores):
            self._prune(draw)
            store.close()
            self.stores[number] = SqliteTrajectoryStore(self.paths[number])

    def compare(self) -> None:
        in_flight = list(self.lengths)
        one, other = (store.progress(in_flight) for store in self.stores)
        assert one == other
        with (
            closing(TrajectoryReader(self.paths[0])) as all_,
            closing(TrajectoryReader(self.paths[1])) as some,
        ):
            assert all_.query(TOTALS) == some.query(TOTALS)
            assert all_.query("SELECT * FROM responses ORDER BY 1, 2") == some.query(
                "SELECT * FROM responses ORDER BY 1, 2"
            )
            for version in range(self.checkpoint, self.version):
                groups = self.batches[version]
                members = [[*range(MEMBERS)]] * len(groups)
                assert all_.batch(groups, members) == some.batch(groups, members)
            followers = [Follower(r, num_tokens=self.history_tokens) for r in (all_, some)]
            news = [
                [(n.trajectory, n.start, n.tokens.tolist()) for n in f.segments(10**6)]
                for f in followers
            ]
            # It may begin earlier where what is between was deleted, never later.
            assert news[1][len(news[1]) - len(news[0]) :] == news[0]

    def close(self) -> None:
        for store in self.stores:
            store.close()


@pytest.fixture(autouse=True)
def slowly(monkeypatch):
    """So that one call leaves something to the next."""
    monkeypatch.setattr(pruning, "ROWS_AT_ONCE", 1)


@settings(max_examples=20, deadline=None)
@given(steps=STEPS, history_tokens=st.integers(0, 40), keep=st.integers(0, 2))
def test_what_a_run_may_read_is_what_it_would_be_unpruned(steps, history_tokens, keep):
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(Twins(Path(folder), history_tokens, keep)) as twins,
    ):
        for step in steps:
            twins.take(step)
        twins.compare()


def run_of(folder: Path, num_versions: int, *, prunes: bool) -> Twins:
    twins = Twins(folder, 10, 0)
    for seed in range(num_versions):
        for kind in ("generate", "generate", "generate", "train", "save", *["prune"] * prunes):
            twins.take(Step(kind, seed))
    return twins


def test_the_file_stays_at_a_size_that_does_not_grow_with_the_run(tmp_path):
    with closing(run_of(tmp_path, 60, prunes=True)) as twins:
        count = "SELECT COUNT(*) FROM segments"
        whole, pruned = (s._connection.execute(count).fetchone()[0] for s in twins.stores)
        assert pruned < 60 < 500 < whole


def test_texts_and_details_go_with_the_tokens(tmp_path):
    with closing(run_of(tmp_path, 10, prunes=True)) as twins:
        query = twins.stores[1]._connection.execute
        (gone,) = query("SELECT COUNT(DISTINCT group_id) FROM pruned").fetchone()
        assert gone >= 5
        left = "SELECT COUNT(*) FROM {} WHERE group_id IN (SELECT group_id FROM pruned)"
        for what in ("segments", "token_details"):
            assert query(left.format(what)).fetchone() == (0,)
        assert query(left.format("trajectories") + " AND text IS NOT NULL").fetchone() == (0,)
        assert query("SELECT value FROM meta WHERE key = 'pruned_before'").fetchone()[0] <= 10


def test_a_batch_whose_tokens_are_gone_is_refused_in_one_line(tmp_path):
    with (
        closing(run_of(tmp_path, 6, prunes=True)) as twins,
        closing(TrajectoryReader(twins.paths[1])) as reader,
    ):
        with pytest.raises(UserError, match=r"tokens of trajectory 0.0 are needed and were del"):
            reader.batch([0], [[0]])
        ((length, text),) = reader.query(
            "SELECT length, text FROM trajectories WHERE group_id = 0 AND member = 0"
        )
        assert sum(each.length for each in reader.segments(TrajectoryId(0, 0))) == length
        assert text is None
