"""Groups under way: parts become segments, and what is over is passed over."""

from __future__ import annotations

import pytest

from rhymeflow.core.events import GroupDrawn
from rhymeflow.core.types import TrajectoryId
from rhymeflow.data.prompts import Prompt
from rhymeflow.data.stream import PromptStream
from rhymeflow.runtime.messages import Part
from rhymeflow.runtime.underway import UnderWay
from rhymeflow.servers.trajectories import TrajectoryServer

SOURCE = [Prompt(row, "ab" * (row + 1), {"answer": row}) for row in range(3)]
FIRST = TrajectoryId(0, 0)


class Letters:
    def encode(self, prompt: Prompt) -> list[int]:
        return [ord(letter) for letter in prompt.prompt]


@pytest.fixture
def store(tmp_path):
    server = TrajectoryServer(tmp_path / "events.db")
    yield server
    server.close()


@pytest.fixture
def under_way(store):
    stream = PromptStream(SOURCE, seed=0, shuffle=False)
    return UnderWay(store, SOURCE, stream, Letters())


def part(start, count, version=0, trajectory=FIRST):
    tokens = list(range(start, start + count))
    return Part(trajectory, start, version, 1, 2, tokens, [-float(token) for token in tokens])


def segments(store, trajectory=FIRST, columns="start, length(tokens) / 4, version, instance"):
    store.commit()
    return store._connection.execute(
        f"SELECT {columns} FROM segments WHERE group_id = ? AND member = ? ORDER BY start",
        trajectory,
    ).fetchall()


def test_a_prompt_drawn_again_is_a_new_group_of_its_row_and_epoch(under_way):
    drawn = [under_way.draw() for _ in range(4)]
    assert drawn[1] == GroupDrawn(1, 1, 0, 4)
    assert drawn[3] == GroupDrawn(3, 0, 1, 2), "the second epoch"
    under_way.end(1)
    assert under_way.redraw(1) == GroupDrawn(4, 1, 0, 4, repeats=1)
    assert under_way.draw() == GroupDrawn(5, 1, 1, 4), "it took no place in the order of prompts"
    assert under_way[4].prompt == under_way[5].prompt == SOURCE[1]


def test_parts_become_one_segment_for_each_version_and_instance(under_way, store):
    under_way.draw()
    under_way.take("a", part(0, 2))
    under_way.take("a", part(2, 3))
    assert segments(store) == []
    under_way.take("a", part(5, 1, version=1))
    assert segments(store) == [(0, 5, 0, "a")]
    assert segments(store, columns="steps, drafted") == [(2, 4)], "the sum of its parts"
    assert under_way.seal(FIRST) == 6
    under_way.take("b", part(6, 2, version=1))
    under_way.seal_all("a")
    assert len(segments(store)) == 2
    under_way.seal_all("b")
    assert segments(store) == [(0, 5, 0, "a"), (5, 1, 1, "a"), (6, 2, 1, "b")]
    assert under_way.tokens(FIRST) == list(range(8))
    assert under_way.seal(FIRST) == 8
    assert under_way.seal(TrajectoryId(0, 1)) == 0
    assert under_way.tokens(TrajectoryId(0, 1)) == []


@pytest.mark.parametrize("moved", [False, True])
def test_a_complete_response_is_stored_and_returned_whole(under_way, store, moved):
    under_way.draw()
    under_way.take("a", part(0, 3))
    if moved:
        under_way.seal(FIRST)
        under_way.take("b", part(3, 2))
    else:
        under_way.take("a", part(3, 2))
    assert under_way.complete(FIRST) == list(range(5))
    assert sum(count for _, count, _, _ in segments(store)) == 5
    assert under_way.complete(FIRST) == list(range(5))


def test_a_gap_is_a_defect(under_way):
    under_way.draw()
    under_way.take("a", part(0, 2))
    with pytest.raises(AssertionError):
        under_way.take("a", part(3, 1))
    under_way.seal(FIRST)
    with pytest.raises(AssertionError):
        under_way.take("b", part(3, 1))


def test_what_is_aborted_or_over_is_passed_over_and_what_there_was_is_stored(under_way, store):
    under_way.draw()
    under_way.take("a", part(0, 2))
    under_way.abort(FIRST)
    assert FIRST not in under_way
    assert segments(store) == [(0, 2, 0, "a")]
    under_way.take("a", part(2, 2))
    under_way.abort(FIRST)  # twice
    other = TrajectoryId(0, 1)
    assert other in under_way
    under_way.take("a", part(0, 4, trajectory=other))
    under_way.end(0)
    assert segments(store, other) == [(0, 4, 0, "a")]
    under_way.take("a", part(4, 2, trajectory=other))
    under_way.abort(other)
    assert other not in under_way
    assert segments(store) == [(0, 2, 0, "a")]
    under_way.seal_all()
    assert segments(store) == [(0, 2, 0, "a")]
