"""Following a store: every segment once and in order, judgements with it or after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rhymeflow.core.events import TrajectoryRewarded
from rhymeflow.core.types import TrajectoryId
from rhymeflow.store.follow import Follower, GroupPrompt
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.store.stores import judge, prompt_of, put

ALL = 10**9


@pytest.fixture
def store(tmp_path: Path):
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    yield store
    store.close()


@pytest.fixture
def reader(store: SqliteTrajectoryStore):
    reader = TrajectoryReader(store.path)
    yield reader
    reader.close()


def told(segments):
    return [(s.trajectory, s.start, s.tokens.tolist(), s.length, s.reward) for s in segments]


def test_new_segments_come_once_and_in_order(store, reader):
    first, second = TrajectoryId(0, 0), TrajectoryId(1, 2)
    tail = Follower(reader, num_tokens=ALL)
    assert tail.segments(9) == []
    put(store, first, 0, [1, 2])
    put(store, second, 0, [3], version=4, epoch=1)
    store.commit()
    put(store, first, 2, [5])
    (one, two) = tail.segments(9)
    assert told([one, two]) == [(first, 0, [1, 2], None, None), (second, 0, [3], None, None)]
    assert tail.segments(9) == [], "what is not committed is not there"
    store.commit()
    assert told(tail.segments(9)) == [(first, 2, [5], None, None)]
    assert tail.segments(9) == []
    assert tail.prompt(1) == GroupPrompt(1, prompt_of(1))


def test_a_judgement_comes_with_the_segment_or_after_it(store, reader):
    early, late = TrajectoryId(0, 0), TrajectoryId(1, 0)
    put(store, early, 0, [1, 2])
    judge(store, early, 2, 0.5)
    put(store, late, 0, [3])
    store.commit()
    tail = Follower(reader, num_tokens=ALL)
    assert tail.rewards() == [], "it comes with the segment"
    assert told(tail.segments(9)) == [(early, 0, [1, 2], 2, 0.5), (late, 0, [3], None, None)]
    judge(store, late, 1, 0.25)
    assert tail.rewards() == []
    store.commit()
    assert tail.rewards() == [TrajectoryRewarded(late, 0.25)]
    assert tail.rewards() == []


@pytest.mark.parametrize(
    ("num_tokens", "starts"),
    [(0, []), (1, []), (2, [4]), (4, [4]), (5, [3, 4]), (9, [1, 2, 3, 4]), (10, [0, 1, 2, 3, 4])],
)
def test_a_tail_may_begin_with_the_last_tokens(store, reader, num_tokens, starts):
    for group, count in enumerate((1, 2, 2, 3, 2)):
        put(store, TrajectoryId(group, 0), 0, [group] * count)
    store.commit()
    found = Follower(reader, num_tokens=num_tokens).segments(9)
    assert [s.trajectory.group for s in found] == starts
