"""Events that come late, twice, out of order, or about what never was: one defect, one test."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.core.commands import FinishEarly, Interrupt, RequestPrompts, Train
from rhymeflow.core.coordinator import Coordinator
from rhymeflow.core.events import (
    Evaluated,
    GroupCreated,
    InstanceJoined,
    InstanceLeft,
    LearnerReady,
    Pulled,
    RewardFailed,
    Snapshot,
    Tick,
    TrajectoryFinished,
    TrajectoryInterrupted,
    TrajectoryRewarded,
    VersionPublished,
)
from rhymeflow.core.strategies.schedules import SCHEDULES
from rhymeflow.core.types import TrajectoryId
from tests.core import invariants
from tests.core.test_coordinator import BOUNDS, a_coordinator, done, routes, run, stuck_mind, tell
from tests.helpers import a_plan, a_schedule

A, B = TrajectoryId(0, 0), TrajectoryId(0, 1)


# -- snapshots -------------------------------------------------------------------------------------


@given(st.permutations(range(8)), st.lists(st.integers(0, 7), max_size=8))
def test_of_snapshots_the_newest_counts_whatever_order_they_come_in(order, again):
    """Two after each of four commands; the one that has decoded more is newer."""
    coordinator = a_coordinator(a_plan(groups_per_batch=2))
    tell(coordinator, GroupCreated(0, 0, 0, 5), GroupCreated(1, 1, 0, 7))
    instance = coordinator.state.instances["a"]
    assert instance.commands == 4
    seen = [Snapshot("a", 1 + i // 2, (A,) if i % 2 else (), 10 * i, float(i)) for i in range(8)]
    for i in (*order, *again):
        coordinator.handle(seen[i])
    assert (instance.kv_tokens, instance.waiting, instance.decoded_tokens) == (70, (A,), 7.0)


# -- instances -------------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_what_is_stored_of_a_response_is_known_when_its_instance_is_lost(early):
    """Even if the report comes after that of the loss."""
    coordinator = a_coordinator(a_plan(groups_per_batch=1), "partial", [("a", 2)])
    tell(coordinator)
    tell(coordinator, GroupCreated(0, 0, 0, 5))
    stored = TrajectoryInterrupted(A, "a", 0, 9), TrajectoryInterrupted(B, "a", 0, 3)
    left = InstanceLeft("a", "killed")
    assert tell(coordinator, *([*stored, left] if early else [left, *stored])) == []
    assert [coordinator.state.member(t).length for t in (A, B)] == [9, 3]
    assert tell(coordinator, stored[1], TrajectoryInterrupted(A, "a", 0, 4)) == []
    assert coordinator.state.member(A).length == 9, "what is stored does not get less"
    tell(coordinator, InstanceJoined("b", 0, 2, 10_000))
    assert coordinator.state.instances["b"].assigned == {A: 5 + 9, B: 5 + 3}
    tell(coordinator, TrajectoryInterrupted(A, "a", 0, 99))
    assert coordinator.state.member(A).length == 9, "b has it: the word of another does not count"


def test_a_stuck_response_whose_instance_is_lost_is_trained_on_as_far_as_it_came():
    """It was retried from nothing, as if nothing of it were stored."""
    coordinator, commands = stuck_mind(on_stuck="truncate")
    assert commands == [Interrupt("a", 3, (TrajectoryId(1, 0),))]
    stored = TrajectoryInterrupted(TrajectoryId(1, 0), "a", 0, 9)
    assert FinishEarly(TrajectoryId(1, 0)) in tell(coordinator, stored, InstanceLeft("a", "killed"))


# -- groups ----------------------------------------------------------------------------------------


@given(st.permutations(range(5)), st.lists(st.integers(0, 4), max_size=6), st.randoms())
def test_groups_are_taken_in_the_order_of_the_data(order, again, rng):
    """However their events come; none is lost, none is taken twice, none requested anew."""
    plan = a_plan(groups_per_batch=5, num_batches=1, num_generations=1, max_staleness=0)
    coordinator = a_coordinator(plan, "partial", [("a", 2)])
    assert tell(coordinator) == [RequestPrompts(5)]
    arriving = [*order, *again]
    rng.shuffle(arriving)
    for group in arriving:
        commands = [c for c in coordinator.handle(GroupCreated(group, group, 0, 5))]
        assert commands == []
    state = coordinator.state
    assert (list(state.queue.unadmitted), state.num_requested, state.early) == ([*range(5)], 0, {})
    assert routes(tell(coordinator)) == [("0.0", "a"), ("1.0", "a")]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["synchronous", "partial"]))
def test_disorder_does_not_change_what_a_synchronous_run_trains_on(seed, name):
    """Law 4, as far as the coordinator goes."""
    plan = a_plan(num_batches=3, groups_per_batch=3, max_staleness=0)
    runtime = run(plan, a_schedule(name), seed=seed, disorder=0.5, duplicates=0.3, crashes=1)
    assert runtime.batches == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]


# -- rewards ---------------------------------------------------------------------------------------


def test_a_reward_before_the_end_of_its_response_is_kept_until_then():
    plan = a_plan(groups_per_batch=1, num_generations=1)
    coordinator = a_coordinator(plan)
    tell(coordinator, GroupCreated(0, 0, 0, 5))
    finished, rewarded = done(0)
    assert not [c for c in tell(coordinator, rewarded, rewarded) if isinstance(c, Train)]
    assert Train(0, (0,), ((0,),)) in tell(coordinator, finished)
    assert tell(coordinator, rewarded, finished) == []


# -- what never was --------------------------------------------------------------------------------


def nonsense(rng: random.Random, state) -> object:
    """An event about what never was, or was before, that must change nothing."""
    group = rng.choice([*state.groups, 10**6])
    unknown = TrajectoryId(group, rng.choice([-1, -2, 99]))
    real = TrajectoryId(group, 0)
    events = [
        TrajectoryFinished(unknown, "rollout-0", 3, "stop"),
        TrajectoryInterrupted(unknown, "rollout-0", 1, 9),
        TrajectoryRewarded(unknown, 1.0),
        RewardFailed(unknown, "broken"),
        TrajectoryFinished(real, "nobody", 3, "stop"),
        Snapshot("nobody", 5, (real,), 77, 3.0),
        Pulled("nobody", 1, 9),
        Evaluated("nobody", 0, 0.5),
        InstanceLeft("nobody", "killed"),
        VersionPublished((state.published or 0) + 5),
    ]
    member = state.member(real)
    if member is not None and member.instance is not None:
        events.append(TrajectoryInterrupted(real, "nobody", 3, 9))
    if state.published is not None:
        events += [LearnerReady(7), VersionPublished(state.published)]
    if state.next_group:
        events.append(GroupCreated(rng.randrange(state.next_group), 5, 0, 50))
    return rng.choice(events)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(SCHEDULES)))
def test_nonsense_and_repetition_change_nothing(seed, name):
    """A run's log, with events between that tell nothing new, gives the same commands."""
    plan = a_plan(num_batches=3, max_staleness=BOUNDS.get(name, 2), on_stuck="truncate")
    runtime = run(plan, a_schedule(name), seed=seed, crashes=2, failures=0.05, disorder=0.2)
    rng, replayed, commands = random.Random(seed), Coordinator(plan, a_schedule(name)), []
    for number, event in enumerate(runtime.log):
        commands += replayed.handle(event)
        earlier = rng.choice(runtime.log[: number + 1])
        told = [nonsense(rng, replayed.state)] + [earlier] * (not isinstance(earlier, Tick))
        for extra in told:
            assert replayed.handle(extra) == [], extra
        invariants.check(replayed.state)
    assert commands == runtime.commands
