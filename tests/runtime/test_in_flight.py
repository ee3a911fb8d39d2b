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
from rhymeflow.runtime.programs import continuation
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.writer import SqliteTrajectoryStore
from rhymeflow.workers.messages import CallMade, Part, TurnFigures, Until
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


@pytest.fixture
def agents(store):
    stream = PromptStream(SOURCE, seed=0, shuffle=False)
    agents = InFlight(store, RunPrompts(SOURCE, stream, Letters(), []), has_agent=True)
    agents.add(agents.draw())
    agents.routed(FIRST, 4)
    return agents


def begin(agents, number, tokens, follows=0, is_streamed=False):
    made = CallMade("", number, tokens, follows, Until(5), TurnFigures(), is_streamed)
    call = agents.calls(FIRST).begin(0, agents.tokens(FIRST), made)
    going = continuation(agents[0], 2, call)
    assert (going.until, going.row_prompt) == (Until(5), [97, 98])
    return call, (going.prompt_ids, going.tokens, going.turn_start, going.noise)


def answer(agents, call, version=4):
    start = len(call.said)
    said = [10 * call.made.number + start]
    return agents.calls(FIRST).take(
        "", "x", Part(FIRST, start, version, 1, 0, said, [-1.0], b"", call.branch)
    )


def test_an_agents_calls_are_answered_in_any_order_each_in_its_own_sequence(agents, store):
    """Their noise does not depend on when they were asked, but on how often (law 3)."""
    a, asked_a = begin(agents, 0, [7, 7])
    b, asked_b = begin(agents, 1, [8])
    again, asked_again = begin(agents, 2, [8])
    for call in (a, b, b, a, again):
        answer(agents, call)
    said = agents.end_call(FIRST, b.branch)
    assert (said.number, said.tokens, said.logprobs, said.end) == (1, [10, 11], [-1.0] * 2, 3)
    end = agents.end_call(FIRST, a.branch).end
    c, asked_c = begin(agents, 3, [9, 9, 9], end)
    d, _ = begin(agents, 4, [9], end)
    assert (c.branch, d.branch) == (a.branch, 3)
    answer(agents, c)
    answer(agents, c, version=5)
    assert agents.end_call(FIRST, c.branch).end == 12
    assert agents.tokens(FIRST) == [8, 10, 11, 7, 7, 0, 1, 9, 9, 9, 30, 31]
    assert segments(store, columns="start, version, follows") == [
        (0, 4, 0), (1, 4, None), (3, 4, 0), (5, 4, None), (7, 4, 7), (10, 4, None), (11, 5, None),
    ]  # fmt: skip
    assert [each[:3] for each in (asked_a, asked_b, asked_again, asked_c)] == [
        ([7, 7], [], 0), ([8], [], 0), ([8], [], 0), ([7, 7], [0, 1, 9, 9, 9], 5),
    ]  # fmt: skip
    assert len({each[3] for each in (asked_a, asked_b, asked_again, asked_c)}) == 4
    assert agents.end_call(FIRST, 9) is None
    agents.abort(FIRST)
    assert agents.tokens(FIRST)[12:] == [8, 20], "what was said in vain is stored"


def test_noise_depends_on_how_often_a_call_was_asked_and_waited_for(agents):
    noises = [begin(agents, number, tokens)[1][3] for number, tokens in enumerate([[8], [7], [8]])]
    calls = agents.calls(FIRST)
    calls.drop(calls.find(0))
    assert calls.find(0) is None
    assert begin(agents, 3, [8])[1][3] == noises[0]
    assert begin(agents, 4, [7])[1][3] not in noises


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


def test_an_answer_that_was_read_in_part_is_a_turn_and_what_still_comes_of_it_is_none(agents):
    a, _ = begin(agents, 0, [7], is_streamed=True)
    grown = [answer(agents, a) for _ in range(2)]
    assert [(each.number, each.tokens, each.logprobs) for each in grown] == [
        (0, [0], [-1.0]), (0, [1], [-1.0]),
    ]  # fmt: skip
    end = agents.end_call(FIRST, a.branch, is_over=False).end
    b, asked = begin(agents, 1, [8], end)
    assert asked[:2] == ([7], [0, 1, 8])
    assert answer(agents, a) is None
    assert b.said == []
    assert answer(agents, b) is None, "it is not streamed"
