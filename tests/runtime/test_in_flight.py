"""Groups in flight: parts become segments, and what is over is passed over."""

from __future__ import annotations

import pytest

from rhymeflow.core.events import GroupCreated
from rhymeflow.core.types import TrajectoryId
from rhymeflow.data.load import RunPrompts
from rhymeflow.data.prompts import Prompt
from rhymeflow.data.stream import PromptStream
from rhymeflow.errors import UserError
from rhymeflow.runtime.in_flight import InFlight
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.writer import SqliteTrajectoryStore
from rhymeflow.workers.messages import Part
from tests.fake_run.models import Letters

SOURCE = [Prompt(row, "ab" * (row + 1), {"answer": row}) for row in range(3)]
FIRST = TrajectoryId(0, 0)


@pytest.fixture
def store(tmp_path):
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    yield store
    store.close()


@pytest.fixture
def in_flight(store):
    stream = PromptStream(SOURCE, seed=0, shuffle=False)
    return InFlight(store, RunPrompts(SOURCE, stream, Letters(), []))


def part(start, count, version=0, trajectory=FIRST):
    tokens = list(range(start, start + count))
    return Part(trajectory, start, version, 1, 2, tokens, [-float(token) for token in tokens])


def segments(store, trajectory=FIRST, columns="start, length(tokens) / 4, version, instance"):
    store.commit()
    return store._connection.execute(
        f"SELECT {columns} FROM segments WHERE group_id = ? AND member = ? ORDER BY start",
        trajectory,
    ).fetchall()


def test_a_prompt_requested_again_is_a_new_group_of_its_row_and_epoch(in_flight):
    requested = [in_flight.add(in_flight.draw()) for _ in range(4)]
    assert requested[1] == GroupCreated(1, 1, 0, 4)
    assert requested[3] == GroupCreated(3, 0, 1, 2), "the second epoch"
    in_flight.end(1)
    assert in_flight.add(in_flight.draw_again(1)) == GroupCreated(4, 1, 0, 4, repeats=1)
    after = in_flight.add(in_flight.draw())
    assert after == GroupCreated(5, 1, 1, 4), "a retry takes no place in the order"
    assert in_flight[4].drawn.prompt == in_flight[5].drawn.prompt == SOURCE[1]


def test_parts_become_one_segment_for_each_version_and_instance(in_flight, store):
    in_flight.add(in_flight.draw())
    in_flight.take("a", part(0, 2))
    in_flight.take("a", part(2, 3))
    assert segments(store) == []
    in_flight.take("a", part(5, 1, version=1))
    assert segments(store) == [(0, 5, 0, "a")]
    assert segments(store, columns="steps, drafted") == [(2, 4)], "the sum of its parts"
    assert in_flight.seal(FIRST) == 6
    in_flight.take("b", part(6, 2, version=1))
    in_flight.seal_all("a")
    assert len(segments(store)) == 2
    in_flight.seal_all("b")
    assert segments(store) == [(0, 5, 0, "a"), (5, 1, 1, "a"), (6, 2, 1, "b")]
    assert in_flight.tokens(FIRST) == list(range(8))
    assert in_flight.seal(FIRST) == 8
    assert in_flight.seal(TrajectoryId(0, 1)) == 0
    assert in_flight.tokens(TrajectoryId(0, 1)) == []


def test_an_agents_call_is_continued_in_its_own_sequence_whatever_came_between(store):
    """Its noise does not depend on when it was asked, but on how often (law 3)."""
    stream = PromptStream(SOURCE, seed=0, shuffle=False)
    asked = {"a": [7, 7], "b": [8], "c": [9, 9, 9]}

    def play(calls):
        agents = InFlight(store, RunPrompts(SOURCE, stream, Letters(), []), has_agent=True)
        agents.add(agents.draw())
        assert agents.continuation(FIRST, 4).prompt_ids == []
        found, length, ends = [], 0, {}
        for name, parent in calls:
            follows = ends.get(parent, 0)
            length = agents.observe(FIRST, asked[name], follows, 5)
            ends[name] = length + 1
            going = agents.continuation(FIRST, 4)
            found.append((going.prompt_ids, going.tokens, going.turn_start, going.noise))
            assert going.before + len(going.tokens) == length
            assert (going.max_turn_tokens, going.row_prompt) == (5, [97, 98])
            agents.take("x", Part(FIRST, length, 4, 1, 0, [1], [-1.0]))
            length = agents.seal(FIRST)
            assert agents[0].logprobs == {0: [-1.0]}
        return found

    found = play([("a", None), ("b", None), ("c", "a"), ("b", None)])
    assert [each[:3] for each in found] == [
        ([7, 7], [], 0), ([8], [], 0), ([7, 7], [1, 9, 9, 9], 4), ([8], [], 0),
    ]  # fmt: skip
    assert len({each[3] for each in found}) == 4
    again = play([("b", None), ("a", None), ("b", None), ("c", "a")])
    assert sorted(again) == sorted(found)


def test_a_gap_is_a_defect(in_flight):
    in_flight.add(in_flight.draw())
    in_flight.take("a", part(0, 2))
    with pytest.raises(AssertionError):
        in_flight.take("a", part(3, 1))
    in_flight.seal(FIRST)
    with pytest.raises(AssertionError):
        in_flight.take("b", part(3, 1))


def test_what_is_aborted_or_over_is_passed_over_and_what_there_was_is_stored(in_flight, store):
    in_flight.add(in_flight.draw())
    other = TrajectoryId(0, 1)
    in_flight.take("a", part(0, 2))
    in_flight.take("a", part(0, 4, trajectory=other))
    in_flight.abort(FIRST)
    assert segments(store) == [(0, 2, 0, "a")]
    in_flight.take("a", part(2, 2))
    in_flight.abort(FIRST)  # twice
    in_flight.end(0)
    assert segments(store) == [(0, 2, 0, "a")]
    assert segments(store, other) == [(0, 4, 0, "a")]
    in_flight.take("a", part(4, 2, trajectory=other))
    assert other not in in_flight


def test_what_an_environment_answers_follows_what_the_policy_said(in_flight, store, tmp_path):
    """For the learner, for the next turn, and for a run that is taken up again."""
    in_flight.add(in_flight.draw())
    in_flight.take("a", part(0, 2, version=1))
    in_flight.seal(FIRST)
    assert in_flight.observe(FIRST, [7, 8, 9]) == 5
    in_flight.take("b", part(5, 1, version=2))
    store.put_finished(FIRST, length=in_flight.seal(FIRST), reason="length")
    store.put_reward(FIRST, reward=1.0, components={})
    store.commit()
    (record,) = TrajectoryReader(tmp_path / "events.db").batch([0], [(0,)])
    assert record.completion_ids == in_flight.tokens(FIRST) == [0, 1, 7, 8, 9, 5]
    assert record.versions == [1, 1, 1, 1, 1, 2]
    assert record.observed == [False, False, True, True, True, False]
    assert record.logprobs == [0.0, -1.0, 0.0, 0.0, 0.0, -5.0]
    assert in_flight.observations(FIRST) == [(2, 5)]
    found = store.progress([0])[0]
    assert (found.observations, found.versions) == ({0: [(2, 5)]}, {0: 2})
    assert found.tokens[0].tolist() == record.completion_ids


def test_what_was_in_flight_is_asked_for_at_once(in_flight, store):
    """Of however many groups: a resumed run has thousands."""
    for _ in range(3):
        in_flight.add(in_flight.draw())
    in_flight.take("a", part(0, 2))
    in_flight.take("a", part(0, 3, trajectory=TrajectoryId(2, 1)))
    in_flight.seal_all()
    store.put_finished(FIRST, length=2, reason="stop")
    another = InFlight(store, in_flight._prompts)
    asked: list[str] = []
    store.commit()
    store._connection.set_trace_callback(asked.append)
    another.restore({0: [], 1: [1], 2: [0]})
    assert [another[group].reasons for group in range(3)] == [{0: "stop"}, {}, {}]
    assert len(asked) == 3
    assert another.tokens(FIRST) == [0, 1]
    assert another.tokens(TrajectoryId(2, 1)) == [0, 1, 2]
    assert TrajectoryId(1, 0) in another
    assert TrajectoryId(1, 1) not in another, "it was aborted"


def test_a_prompt_with_yesterdays_date_goes_on_as_it_was(in_flight, store, monkeypatch):
    in_flight.add(in_flight.draw())
    store.commit()
    before = in_flight[0].prompt_ids
    another = InFlight(store, in_flight._prompts)
    monkeypatch.setattr(Letters, "encode", lambda self, prompt: [*before, 9])
    with pytest.raises(UserError, match="row 0 is not what it was"):
        another.restore({0: []})
    monkeypatch.setattr(Letters, "writes_date", True)
    another.restore({0: []})
    assert another[0].prompt_ids == before


def test_what_is_not_stored_cannot_be_taken_up(in_flight):
    in_flight.add(in_flight.draw())
    with pytest.raises(UserError, match="the log has group 1, but not its prompt"):
        in_flight.restore({0: [], 1: []})
