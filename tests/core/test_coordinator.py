"""The mind against a fake body that orders, delays and repeats facts as it likes."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.core.commands import Draw, Evaluate, Finish, Pull, Route, Train
from rhymeflow.core.coordinator import Coordinator, Plan
from rhymeflow.core.events import (
    Evaluated,
    GroupDrawn,
    InstanceJoined,
    LearnerReady,
    Pulled,
    RewardFailed,
    TrajectoryFinished,
    TrajectoryRewarded,
    VersionPublished,
)
from rhymeflow.core.types import TrajectoryId
from tests.helpers import FakeBody

plans = st.builds(
    Plan,
    num_batches=st.integers(1, 6),
    groups_per_batch=st.integers(1, 4),
    num_generations=st.integers(1, 3),
    max_staleness=st.integers(0, 3),
    eval_steps=st.sampled_from([None, 0, 1, 2]),
)
capacities = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


def run(plan: Plan, capacities=(4, 4), seed=0, **options) -> FakeBody:
    chooser = random.Random(seed)
    body = FakeBody(plan, capacities=capacities, choose=chooser.randrange, seed=seed, **options)
    return body.run()


@settings(max_examples=200, deadline=None)
@given(
    plan=plans,
    capacities=capacities,
    seed=st.integers(0, 2**32),
    failures=st.sampled_from([0.0, 0.0, 0.1]),
    duplicates=st.sampled_from([0.0, 0.2]),
)
def test_any_order_of_facts_ends_with_every_batch_trained_within_the_bound(
    plan, capacities, seed, failures, duplicates
):
    body = run(plan, capacities, seed, failures=failures, duplicates=duplicates)
    assert len(body.batches) == plan.num_batches
    assert body.published == plan.num_batches
    assert not body.mind.groups, "law 2: a group ended in neither way"
    assert body.serial == sum(map(len, body.batches)) + len(body.dropped), (
        "law 2: drawn for nothing"
    )
    if plan.eval_steps is not None:
        assert {0, plan.num_batches} <= set(body.evaluated)
        assert len(set(body.evaluated)) == len(body.evaluated), "evaluated twice"


def test_an_adversarial_order_newest_first_still_ends():
    plan = Plan(5, 3, 2, 2, 1)
    for pick in (lambda n: n - 1, lambda n: 0):
        body = FakeBody(plan, capacities=(3, 5), choose=pick).run()
        assert len(body.batches) == 5


def test_staleness_is_used_when_allowed_and_zero_when_not():
    assert {a for s in range(5) for a in run(Plan(6, 2, 2, 0, None), seed=s).staleness} == {0}
    ages = {a for s in range(5) for a in run(Plan(6, 2, 2, 2, None), seed=s).staleness}
    assert ages == {0, 1, 2}


def test_staleness_zero_trains_batches_in_the_order_of_the_data():
    body = run(Plan(4, 3, 2, 0, None), seed=3)
    assert body.batches == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]


def test_replaying_the_log_gives_the_same_commands():
    plan = Plan(5, 3, 2, 1, 2)
    body = run(plan, seed=11, failures=0.05, duplicates=0.1)
    replayed = Coordinator(plan)
    commands = [c for event in body.log for c in replayed.handle(event, now=0.0)]
    assert commands == body.commands


def test_nothing_is_commanded_before_the_learner_has_published():
    mind = Coordinator(Plan(1, 1, 1, 0, None))
    assert mind.handle(InstanceJoined("a", 0, 4), 0.0) == []
    assert mind.handle(LearnerReady(0), 0.0) == [Draw(1)]


def test_requests_go_where_the_fewest_are():
    mind = Coordinator(Plan(1, 4, 1, 0, None))
    mind.handle(LearnerReady(0), 0.0)
    for name in "ab":
        mind.handle(InstanceJoined(name, 0, 8), 0.0)
    routes = [mind.handle(GroupDrawn(g, g, 0, 1), 0.0)[0] for g in range(4)]
    assert [r.instance for r in routes if isinstance(r, Route)] == ["a", "b", "a", "b"]


def test_a_late_member_on_an_older_instance_keeps_the_group_within_its_window():
    # One group of two members; the second starts on an instance that still holds version 0.
    plan = Plan(3, 1, 2, 1, None)
    for seed in range(200):
        body = run(plan, capacities=(1, 2, 1), seed=seed)
        assert max(body.staleness) <= 1


def test_a_group_without_a_reward_is_dropped_and_replaced():
    mind = Coordinator(Plan(1, 1, 1, 0, None))
    mind.handle(LearnerReady(0), 0.0)
    mind.handle(InstanceJoined("a", 0, 1), 0.0)
    mind.handle(GroupDrawn(0, 0, 0, 1), 0.0)
    mind.handle(TrajectoryFinished(TrajectoryId(0, 0), "a", 2, "stop"), 0.0)
    mind.handle(GroupDrawn(1, 1, 0, 1), 0.0)
    commands = mind.handle(RewardFailed(TrajectoryId(0, 0), "raised"), 0.0)
    assert commands[0].reason == "reward failed: raised"
    assert commands[1] == Route("a", 2, TrajectoryId(1, 0))
    assert mind.handle(TrajectoryRewarded(TrajectoryId(0, 0), 1.0), 0.0) == []
    mind.handle(TrajectoryFinished(TrajectoryId(1, 0), "a", 2, "stop"), 0.0)
    assert mind.handle(TrajectoryRewarded(TrajectoryId(1, 0), 1.0), 0.0)[0] == Train(0, (1,))


def test_members_of_a_dropped_group_that_wait_are_not_started():
    mind = Coordinator(Plan(1, 1, 3, 0, None))
    mind.handle(LearnerReady(0), 0.0)
    mind.handle(InstanceJoined("a", 0, 1), 0.0)
    mind.handle(GroupDrawn(0, 0, 0, 1), 0.0)
    mind.handle(TrajectoryFinished(TrajectoryId(0, 0), "a", 2, "stop"), 0.0)
    drop, draw = mind.handle(RewardFailed(TrajectoryId(0, 0), "raised"), 0.0)
    assert (drop.group, draw) == (0, Draw(1))
    assert mind.handle(GroupDrawn(1, 1, 0, 1), 0.0) == [Route("a", 3, TrajectoryId(1, 0))]


def test_a_late_report_of_an_earlier_evaluation_does_not_end_the_one_under_way():
    mind = Coordinator(Plan(1, 1, 1, 0, 1))
    mind.handle(LearnerReady(0), 0.0)
    assert Evaluate("a", 1, 0) in mind.handle(InstanceJoined("a", 0, 1), 0.0)
    mind.handle(Evaluated("a", 0, 0.5), 0.0)
    mind.handle(GroupDrawn(0, 0, 0, 1), 0.0)
    mind.handle(TrajectoryFinished(TrajectoryId(0, 0), "a", 2, "stop"), 0.0)
    mind.handle(TrajectoryRewarded(TrajectoryId(0, 0), 1.0), 0.0)
    assert mind.handle(VersionPublished(1), 0.0) == [Pull("a", 3, 1), Evaluate("a", 4, 1)]
    assert mind.handle(Evaluated("a", 0, 0.5), 0.0) == []
    assert mind.handle(Evaluated("a", 1, 0.5), 0.0) == [Finish()]


def test_an_instance_that_got_a_newer_version_than_asked_for_is_known_to_have_it():
    mind = Coordinator(Plan(3, 1, 1, 1, None))
    mind.handle(LearnerReady(0), 0.0)
    mind.handle(InstanceJoined("a", 0, 1), 0.0)
    mind.handle(Pulled("a", 1, 2), 0.0)
    mind.handle(GroupDrawn(0, 0, 0, 1), 0.0)
    assert mind.buffers.version(0) == 2


def test_finish_is_said_once_and_last():
    body = run(Plan(2, 1, 1, 1, 1), duplicates=0.5, seed=5)
    assert body.commands[-1] == Finish()
    assert sum(isinstance(c, Finish) for c in body.commands) == 1
    pulls = [c.version for c in body.commands if isinstance(c, Pull)]
    assert pulls
    assert max(pulls) == 2


def test_a_rewarded_trajectory_must_have_finished():
    mind = Coordinator(Plan(1, 1, 1, 0, None))
    mind.handle(LearnerReady(0), 0.0)
    mind.handle(InstanceJoined("a", 0, 1), 0.0)
    mind.handle(GroupDrawn(0, 0, 0, 1), 0.0)
    with pytest.raises(AssertionError):
        mind.handle(TrajectoryRewarded(TrajectoryId(0, 0), 1.0), 0.0)
