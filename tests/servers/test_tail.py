"""Following a store: every segment once and in order, judgements with it or after it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rhymeflow.core.events import TrajectoryRewarded
from rhymeflow.core.types import TrajectoryId
from rhymeflow.servers.reader import TrajectoryReader
from rhymeflow.servers.tail import Drawn, Tail
from rhymeflow.servers.trajectories import TrajectoryServer
from tests.servers.stores import judge, prompt_of, put

ALL = 10**9


@pytest.fixture
def server(tmp_path: Path):
    server = TrajectoryServer(tmp_path / "events.db")
    yield server
    server.close()


@pytest.fixture
def reader(server: TrajectoryServer):
    reader = TrajectoryReader(server.path)
    yield reader
    reader.close()


def told(segments):
    return [(s.trajectory, s.start, s.tokens.tolist(), s.length, s.reward) for s in segments]


def test_new_segments_come_once_and_in_order(server, reader):
    first, second = TrajectoryId(0, 0), TrajectoryId(1, 2)
    tail = Tail(reader, num_tokens=ALL)
    assert tail.segments(9) == []
    put(server, first, 0, [1, 2])
    put(server, second, 0, [3], version=4, epoch=1)
    server.commit()
    put(server, first, 2, [5])
    (one, two) = tail.segments(9)
    assert told([one, two]) == [(first, 0, [1, 2], None, None), (second, 0, [3], None, None)]
    assert (one.version, two.version) == (0, 4)
    assert tail.segments(9) == [], "what is not committed is not there"
    server.commit()
    assert told(tail.segments(9)) == [(first, 2, [5], None, None)]
    assert tail.segments(9) == []
    assert tail.drawn(1) == Drawn(1, prompt_of(1))
    assert tail.last_version() == 4


def test_a_judgement_comes_with_the_segment_or_after_it(server, reader):
    early, late = TrajectoryId(0, 0), TrajectoryId(1, 0)
    put(server, early, 0, [1, 2])
    judge(server, early, 2, 0.5)
    put(server, late, 0, [3])
    server.commit()
    tail = Tail(reader, num_tokens=ALL)
    assert tail.rewards() == [], "it comes with the segment"
    assert told(tail.segments(9)) == [(early, 0, [1, 2], 2, 0.5), (late, 0, [3], None, None)]
    judge(server, late, 1, 0.25)
    assert tail.rewards() == []
    server.commit()
    assert tail.rewards() == [TrajectoryRewarded(late, 0.25)]
    assert tail.rewards() == []


@pytest.mark.parametrize(
    ("num_tokens", "starts"),
    [(0, []), (1, []), (2, [4]), (4, [4]), (5, [3, 4]), (9, [1, 2, 3, 4]), (10, [0, 1, 2, 3, 4])],
)
def test_a_tail_may_begin_with_the_last_tokens(server, reader, num_tokens, starts):
    for group, count in enumerate((1, 2, 2, 3, 2)):
        put(server, TrajectoryId(group, 0), 0, [group] * count)
    server.commit()
    found = Tail(reader, num_tokens=num_tokens).segments(9)
    assert [s.trajectory.group for s in found] == starts


def test_however_it_is_read_nothing_is_missed(server, reader):
    """Every response ends up whole, and with its reward from one place or the other."""
    chance = random.Random(0)
    tail = Tail(reader, num_tokens=ALL)
    lengths = {TrajectoryId(group, 0): 0 for group in range(8)}
    texts, rewards = {}, {}

    def read(limit):
        for judged in tail.rewards():
            rewards[judged.trajectory] = judged.reward
        for segment in tail.segments(limit):
            assert segment.start == len(texts.setdefault(segment.trajectory, []))
            texts[segment.trajectory] += segment.tokens.tolist()
            if segment.reward is not None:
                rewards[segment.trajectory] = segment.reward

    for _ in range(200):
        trajectory = chance.choice(list(lengths))
        if lengths[trajectory] < 10:
            put(server, trajectory, lengths[trajectory], [lengths[trajectory]] * 2)
            lengths[trajectory] += 2
            if lengths[trajectory] == 10:
                judge(server, trajectory, 10, float(trajectory.group))
        if chance.random() < 0.5:
            server.commit()
        if chance.random() < 0.5:
            read(chance.randrange(1, 4))
    server.commit()
    for _ in range(50):
        read(1)
    assert texts == {t: [n // 2 * 2 for n in range(10)] for t in lengths}
    assert rewards == {t: float(t.group) for t in lengths}
