"""Pruning: what a run may still read is what it would be without, and the rest goes."""

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.core.types import TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.store import pruning
from rhymeflow.store.follow import Follower
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.store.made_up import MadeUpRun

TOTALS = """SELECT group_id, member, SUM(length), MIN(version), MAX(version), SUM(steps)
    FROM spans GROUP BY 1, 2 ORDER BY 1, 2"""
RESPONSES = "SELECT * FROM responses ORDER BY 1, 2"


@pytest.fixture(autouse=True)
def slowly(monkeypatch):
    """So that one call leaves something to the next."""
    monkeypatch.setattr(pruning, "ROWS_AT_ONCE", 1)


@contextmanager
def twins(folder: Path, seed: int, parts: list[int], **pruned: int) -> Iterator[list[MadeUpRun]]:
    """Two runs that do the same, the second one pruned. After each part it is as after a crash:
    what was not committed is not there."""
    runs = [MadeUpRun(folder / name, seed) for name in ("all", "some")]
    for num_commits in parts:
        for run, prunes in zip(runs, (False, True), strict=True):
            run.go_on(num_commits, prunes=prunes, **pruned)
            if prunes and run.checkpoint:
                run.store.prune(before=run.checkpoint, history_tokens=0)
            run.store.close()
            run.store = SqliteTrajectoryStore(run.path / "events.db")
    yield runs
    for run in runs:
        run.store.close()


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    parts=st.lists(st.integers(1, 15), min_size=1, max_size=4),
    tokens=st.integers(0, 40),
    keep=st.integers(0, 2),
)
def test_what_a_run_may_read_is_what_it_would_be_unpruned(seed, parts, tokens, keep):
    with (
        tempfile.TemporaryDirectory() as folder,
        twins(Path(folder), seed, parts, tokens=tokens, keep=keep) as runs,
        closing(TrajectoryReader(runs[0].path / "events.db")) as every,
        closing(TrajectoryReader(runs[1].path / "events.db")) as some,
    ):
        in_flight = list(runs[0].open)
        assert runs[0].store.progress(in_flight) == runs[1].store.progress(in_flight)
        for statement in (TOTALS, RESPONSES):
            assert every.query(statement) == some.query(statement)
        for version in range(runs[0].checkpoint, runs[0].version):
            group = runs[0].trained[version]
            assert every.batch([group], [[0]]) == some.batch([group], [[0]])
        followers = [Follower(reader, num_tokens=tokens) for reader in (every, some)]
        news = [
            [(n.trajectory, n.start, n.tokens.tolist()) for n in f.segments(10**6)]
            for f in followers
        ]
        # It may begin earlier where what is between was deleted, never later.
        assert news[1][len(news[1]) - len(news[0]) :] == news[0]


def test_the_file_stays_at_a_size_that_does_not_grow_with_the_run(tmp_path):
    with twins(tmp_path, 0, [150]) as runs:
        count = """SELECT COUNT(*) FROM segments JOIN groups USING (group_id)
            WHERE ending IS NOT NULL AND suite IS NULL"""
        ((whole,), (pruned,)) = (r.store._connection.execute(count).fetchone() for r in runs)
        assert pruned < 60 < 300 < whole


def test_texts_and_details_go_with_the_tokens_and_a_batch_of_them_is_refused(tmp_path):
    with (
        twins(tmp_path, 0, [40]) as (_, run),
        closing(TrajectoryReader(run.path / "events.db")) as reader,
    ):
        ((gone,),) = reader.query("SELECT COUNT(DISTINCT group_id) FROM pruned")
        assert gone >= 5
        left = "SELECT COUNT(*) FROM {} WHERE group_id IN (SELECT group_id FROM pruned)"
        for what in ("segments", "token_details"):
            assert reader.query(left.format(what)) == [(0,)]
        assert reader.query(left.format("trajectories") + " AND text IS NOT NULL") == [(0,)]
        ((before,),) = reader.query("SELECT value FROM meta WHERE key = 'pruned_before'")
        assert before <= run.checkpoint
        one = TrajectoryId(run.trained[0], 0)
        said = rf"tokens of trajectory {one.group}\.0 are needed but were deleted"
        with pytest.raises(UserError, match=said):
            reader.batch([one.group], [[0]])
        ((length, text),) = reader.query(
            "SELECT length, text FROM trajectories WHERE group_id = ?", one.group
        )
        assert sum(each.length for each in reader.segments(one)) == length
        assert text is None
