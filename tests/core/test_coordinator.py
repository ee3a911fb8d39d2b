"""The coordinator in any order of events, late, repeated and lost ones; then one test for each
defect, and for what the schedules promise."""

import random
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.core import commands as c
from rhymeflow.core import events as e
from rhymeflow.core.coordinator import Coordinator
from rhymeflow.core.histopipe.pipeline import Pipeline
from rhymeflow.core.plan import BatchOrder, OnPull
from rhymeflow.core.strategies import base
from rhymeflow.core.strategies.schedules import MIGRATION, ROUTING, SCHEDULES, SYNC
from rhymeflow.core.types import TrajectoryId
from tests.core import invariants
from tests.core.interleaving import Interleaving, a_plan, a_schedule

BOUNDS = {"synchronous": 0, "one_step": 1}
A, B = TrajectoryId(0, 0), TrajectoryId(0, 1)


@st.composite
def runs(draw):
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    plan = a_plan(
        num_batches=draw(st.integers(1, 6)), groups_per_batch=draw(st.integers(1, 4)),
        num_generations=draw(st.integers(1, 3)),
        max_staleness=BOUNDS.get(name, draw(st.integers(0, 3))),
        batch_order=draw(st.sampled_from(get_args(BatchOrder))),
        accumulate_early=draw(st.booleans()),
        eval_steps=draw(st.dictionaries(st.sampled_from("abc"), st.integers(0, 2))),
        extra_groups=draw(st.integers(0, 2)), extra_generations=draw(st.integers(0, 2)),
        filter_zero_variance=draw(st.booleans()), max_filtered=draw(st.integers(1, 8)),
        on_stuck=draw(st.sampled_from(["wait", "retry", "truncate"])),
        stuck_threshold=draw(st.integers(1, 2)),
    )  # fmt: skip
    mix = draw(st.just({}) | st.fixed_dictionaries(RULES))
    inflight = draw(st.sampled_from([1, 2, 100]))
    group_size = draw(st.sampled_from([2, 100]))  # of so large ones all that runs may be an outlier
    settings = replace(a_schedule().settings, group_size=group_size)
    schedule = a_schedule(name, max_inflight_groups=inflight, settings=settings, **mix)
    # Rules of several schedules may move a response back and forth for as long as nothing else is
    # let happen, which only an unfair order does.
    unfair = [] if mix else [lambda n: n - 1, lambda n: 0]
    return plan, schedule, draw(st.sampled_from([None, None, None, *unfair]))


RULES = {
    "routing": st.sampled_from(sorted(ROUTING)).map(ROUTING.get),
    "sync": st.sampled_from(sorted(SYNC)).map(SYNC.get),
    "migration": st.sampled_from(sorted(MIGRATION)).map(MIGRATION.get),
    "on_pull": st.sampled_from(get_args(OnPull)),
}
capacities = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


def run(plan, schedule=None, capacities=(4, 4), seed=0, **options) -> Interleaving:
    return Interleaving(plan, schedule, capacities=capacities, seed=seed, **options).run()


def tell(coordinator, *events):
    """Report events and a tick; return what was commanded."""
    return [each for event in [*events, e.Tick()] for each in coordinator.handle(event)]


def a_coordinator(plan, schedule="partial", instances=(("a", 4),)) -> Coordinator:
    coordinator = Coordinator(plan, a_schedule(schedule))
    coordinator.handle(e.LearnerReady(0))
    for name, capacity in instances:
        coordinator.handle(e.InstanceJoined(name, 0, capacity, 10_000))
    return coordinator


def begun(schedule="partial", instances=(("a", 4),), groups=1, **plan):
    """A coordinator that was told of so many groups, and what it commanded then."""
    coordinator = a_coordinator(a_plan(**plan), schedule, instances)
    tell(coordinator)
    return coordinator, tell(coordinator, *(e.GroupCreated(g, g, 0, 5) for g in range(groups)))


def done(group, member=0, instance="a", reward=1.0):
    """The events of a response that has ended and been judged."""
    trajectory = TrajectoryId(group, member)
    return (
        e.TrajectoryFinished(trajectory, instance, 2, "stop"),
        e.TrajectoryRewarded(trajectory, reward),
    )


def routes(commands):
    found = [each for each in commands if isinstance(each, c.Route)]
    return [(str(each.trajectory), each.instance) for each in found]


@settings(max_examples=200, deadline=None)
@given(
    scenario=runs(),
    capacities=capacities,
    options=st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**32),
            "failures": st.sampled_from([0.0, 0.0, 0.1]),
            "duplicates": st.sampled_from([0.0, 0.2]),
            "crashes": st.integers(0, 3),
            "disorder": st.sampled_from([0.0, 0.1, 0.5]),
            "overlaps": st.sampled_from([0.0, 0.5]),
        }
    ),
    most=st.sampled_from([base.LEAST_LIMIT, 1]),
)
def test_any_order_of_events_ends_with_every_batch_trained_within_the_bound(
    scenario, capacities, options, most
):
    """Under any mix of rules, and under each schedule's own also where what came last is always the
    first; and where a tick routes one trajectory, or interrupts one, and another follows at once.
    """
    plan, schedule, choose = scenario
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "LEAST_LIMIT", most)
        runtime = run(plan, schedule, capacities, choose=choose, **options)
    evaluated = runtime.evaluated
    ended = [group for batch in runtime.batches for group in batch] + list(runtime.dropped)
    layout = runtime.coordinator.state.layout
    if isinstance(layout, Pipeline):
        assert not any(group in layout for group in ended), "what has ended is forgotten"
    if not plan.extra_groups:  # with surplus, nobody knows beforehand how many will be needed
        assert runtime.num_groups == len(ended), "law 2: requested for nothing"
    assert plan.evaluations([plan.num_batches]) <= set(evaluated)
    assert set(evaluated) <= plan.evaluations(range(plan.num_batches + 1))
    if not options["crashes"]:
        assert plan.evaluations([0]) <= set(evaluated)
        assert len(set(evaluated)) == len(evaluated), "evaluated twice"


def test_one_step_admits_a_batch_only_when_the_one_before_is_complete():
    coordinator, first = begun("one_step", [("a", 16)], 2, num_batches=4, num_generations=1)
    assert routes(first) == [("0.0", "a"), ("1.0", "a")]
    more = tell(coordinator, e.GroupCreated(2, 2, 0, 5), e.GroupCreated(3, 3, 0, 5), *done(0))
    assert routes(more) == [], "there is room, but the batch is not complete"
    more = tell(coordinator, *done(1))
    assert c.Train(0, (0, 1), ((0,), (0,))) in more
    assert routes(more) == [("2.0", "a"), ("3.0", "a")], "while batch 0 is trained on"


def test_no_more_groups_are_under_way_than_the_schedule_wants():
    plan = a_plan(num_batches=6, groups_per_batch=2, num_generations=1, max_staleness=3)
    coordinator = Coordinator(plan, a_schedule("staleflow", max_inflight_groups=3))
    coordinator.handle(e.LearnerReady(0))
    tell(coordinator, e.InstanceJoined("a", 0, 16, 10_000))
    commands = tell(coordinator, *(e.GroupCreated(group, group, 0, 5) for group in range(6)))
    assert [t for t, _ in routes(commands)] == ["0.0", "1.0", "2.0"]
    assert [t for t, _ in routes(tell(coordinator, *done(1)))] == ["3.0"]


def test_kv_tokens_are_those_seen_and_those_commanded_since():
    coordinator, _ = begun(groups=2)
    instance = coordinator.state.instances["a"]
    assert instance.kv_tokens == 4 * 5
    tell(coordinator, e.Snapshot("a", 2, (), 13, 0.0))
    assert instance.kv_tokens == 13 + 2 * 5, "commands 3 and 4 are not reflected"
    tell(coordinator, e.Snapshot("a", 4, (), 30, 0.0))
    assert instance.kv_tokens == 30
    tell(coordinator, done(0)[0])
    assert instance.kv_tokens == 30 - (5 + 2)


@pytest.mark.parametrize(
    ("components", "is_filtered"),
    [
        (None, True),  # the sum alone is compared
        (({"a": (1.0, 1.0), "b": (1.0, 0.0)}, {"a": (1.0, 0.0), "b": (1.0, 1.0)}), True),
        (({"a": (1.0, 1.0), "b": (0.1, 0.0)}, {"a": (1.0, 0.0), "b": (0.1, 10.0)}), False),
        (({"a": (1.0, 1.0)}, {"a": (1.0, 1.0)}), True),
    ],
)
def test_a_group_whose_rewards_teach_each_by_itself_is_not_filtered(components, is_filtered):
    """Rewards that are compared one by one: equal sums of them may teach."""
    coordinator, _ = begun(groups_per_batch=1, filter_zero_variance=True, max_filtered=1)
    for member in range(2):
        finished, rewarded = done(0, member)
        if components is not None:
            rewarded = replace(rewarded, components=components[member])
        commands = tell(coordinator, finished, rewarded)
    assert (c.Drop(0, "filtered", "all its rewards are equal") in commands) is is_filtered


def stuck_mind(**changes):
    """The learner waits for group 1 alone."""
    coordinator, _ = begun(groups=2, num_generations=1, max_staleness=0, **changes)
    return coordinator, tell(coordinator, *done(0))


def test_a_stuck_group_is_retried():
    coordinator, commands = stuck_mind(on_stuck="retry", max_retries=1)
    assert commands[:3] == [
        c.Abort("a", 3, (TrajectoryId(1, 0),)),
        c.Drop(1, "aborted", "stuck; its prompt is retried"),
        c.RetryPrompt(1),
    ]
    assert routes(tell(coordinator, e.GroupCreated(2, 1, 0, 5, repeats=1))) == [("2.0", "a")]
    assert tell(coordinator) == [], "it was tried again once; now it is waited for"
    assert c.Train(0, (0, 2), ((0,), (0,))) in tell(coordinator, *done(2))


def test_a_group_whose_program_is_lost_begins_again_wherever_it_was():
    """While the program works, while the policy answers, and while it is being judged."""
    coordinator, _ = begun(groups=3, num_generations=1)
    tell(coordinator, *(e.TurnEnded(TrajectoryId(group, 0), "a", 1, 0) for group in (0, 1)))
    tell(coordinator, e.Observed(TrajectoryId(1, 0), 1, 5), done(2)[0])
    for group in range(3):
        trajectory = TrajectoryId(group, 0)
        told = tell(coordinator, e.ProgramLost(trajectory, "gone"))
        dropped = c.Drop(group, "aborted", "gone; its prompt is retried")
        assert [each for each in told if isinstance(each, c.Drop | c.RetryPrompt)] == [
            dropped, c.RetryPrompt(group),
        ]  # fmt: skip
        assert tell(coordinator, e.ProgramLost(trajectory, "gone")) == []
    again = [e.GroupCreated(3 + group, group, 0, 5, repeats=group) for group in range(3)]
    assert routes(tell(coordinator, *again)) == [(f"{group}.0", "a") for group in (5, 4, 3)]
    told = tell(coordinator, *done(3), e.ProgramLost(TrajectoryId(3, 0), "it had been judged"))
    assert not any(isinstance(each, c.Drop) for each in told)


def test_an_agents_next_call_is_answered_before_others_first_calls():
    """Else all of them are between two calls at once, and few caches are kept so long."""
    coordinator, told = begun(groups=3, num_generations=1, instances=(("a", 1),))
    for group in range(3):  # their programs begin
        assert routes(told) == [(f"{group}.0", "a")]
        told = tell(coordinator, e.TurnEnded(TrajectoryId(group, 0), "a", 1, 0))
    first, second, third = (TrajectoryId(group, 0) for group in range(3))
    calls = [e.Observed(each, 1, 0) for each in (first, second, third)]
    assert routes(tell(coordinator, *calls)) == [("0.0", "a")]
    told = tell(coordinator, e.TurnEnded(first, "a", 2, 7, 5), e.Observed(first, 2, 7))
    assert routes(told) == [("0.0", "a")]
    told = tell(coordinator, e.TurnEnded(first, "a", 3, 9), e.EpisodeEnded(first, 3, "stop"))
    assert routes(told) == [("1.0", "a")]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_stuck_group_is_trained_on_as_far_as_it_came(is_lost):
    coordinator, commands = stuck_mind(on_stuck="truncate")
    stuck = TrajectoryId(1, 0)
    assert commands == [c.Interrupt("a", 3, (stuck,))]
    assert tell(coordinator) == [], "it is being stopped"
    stored = [e.TrajectoryInterrupted(stuck, "a", 0 if is_lost else 3, 9)]
    told = tell(coordinator, *stored, *[e.InstanceLeft("a", "killed")] * is_lost)
    assert told == [c.FinishEarly(stuck)]
    assert c.Train(0, (0, 1), ((0,), (0,))) in tell(coordinator, e.TrajectoryRewarded(stuck, 0.0))


def evaluations(commands):
    found = [each for each in commands if isinstance(each, c.Evaluate)]
    return [(each.instance, each.version, each.suite) for each in found]


def test_suites_that_are_due_together_come_to_several_instances():
    plan = a_plan(eval_steps={"x": 1, "y": 1, "z": 0})
    coordinator = a_coordinator(plan, instances=[("a", 1), ("b", 1)])
    assert evaluations(tell(coordinator)) == [("a", 0, "x"), ("b", 0, "y"), ("a", 0, "z")]
    tell(coordinator, e.Evaluated("a", 0, 0.5, "x"), e.Evaluated("a", 0, 0.5, "x"))
    assert {s for _, s in coordinator.state.instances["a"].evaluating} == {"z"}
    left = tell(coordinator, e.InstanceLeft("a", "killed"))
    assert evaluations(left) == [("b", 0, "z")], "and what was over is not evaluated again"


def lagging(**changes):
    """The version that is published is of no use yet for either of two instances."""
    plan = a_plan(groups_per_batch=1, num_generations=1, max_staleness=2, num_batches=9)
    schedule = a_schedule("rhymeflow", sync=lambda instance, view: False, **changes)
    coordinator = Coordinator(replace(plan, eval_steps={"x": 1}), schedule)
    coordinator.handle(e.LearnerReady(0))
    for name in "ab":
        coordinator.handle(e.InstanceJoined(name, 0, 2, 10_000))
    assert evaluations(tell(coordinator)) == [("a", 0, "x")]
    tell(coordinator, *(e.GroupCreated(group, group, 0, 5) for group in range(3)))
    tell(coordinator, *done(0), *done(0, instance="b"))
    return coordinator


def test_a_version_that_is_to_be_evaluated_is_pulled_by_the_one_with_the_least_to_do():
    """Others keep what they have; and the one that evaluates pulls nothing meanwhile."""
    commands = tell(lagging(), e.VersionPublished(1))
    assert [each.instance for each in commands if isinstance(each, c.Pull)] == ["b"]
    assert evaluations(commands) == [("b", 1, "x")]
    coordinator = lagging()
    tell(coordinator, e.Evaluated("a", 0, 0.5, "x"), e.VersionPublished(1))
    holding = {name: i.version for name, i in coordinator.state.instances.items()}
    assert sorted(holding.values()) == [0, 1]


def test_the_strategies_of_a_user_cannot_break_the_protocol():
    def everything_everywhere(view):
        for trajectory in view.queue:
            for instance in view.instances:
                yield trajectory.id, instance.name

    plan = a_plan(num_batches=5, groups_per_batch=3)
    schedule = replace(
        a_schedule("staleflow"), routing=everything_everywhere, sync=lambda i, v: False
    )
    with pytest.raises(AssertionError, match="deadlock"):  # nobody ever pulls
        run(plan, schedule)
    assert run(plan, replace(schedule, sync=lambda i, v: True)).finished
    one_lags = replace(schedule, sync=lambda i, v: i.name == "rollout-0" or not i.assigned)
    assert all(run(plan, one_lags, seed=seed).finished for seed in range(20))


# -- snapshots -------------------------------------------------------------------------------------


@given(st.permutations(range(8)), st.lists(st.integers(0, 7), max_size=8))
def test_of_snapshots_the_newest_counts_whatever_order_they_come_in(order, again):
    """Two after each of four commands; the one that has decoded more is newer."""
    coordinator, _ = begun(groups=2)
    instance = coordinator.state.instances["a"]
    assert instance.commands == 4
    seen = [e.Snapshot("a", 1 + i // 2, (A,) if i % 2 else (), 10 * i, float(i)) for i in range(8)]
    for i in (*order, *again):
        coordinator.handle(seen[i])
    assert (instance.kv_tokens, instance.waiting, instance.decoded_tokens) == (70, (A,), 7.0)


# -- instances -------------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_what_is_stored_of_a_response_is_known_when_its_instance_is_lost(early):
    """Even if the report comes after that of the loss."""
    coordinator, _ = begun(instances=[("a", 2)], groups_per_batch=1)
    stored = e.TrajectoryInterrupted(A, "a", 0, 9), e.TrajectoryInterrupted(B, "a", 0, 3)
    left = e.InstanceLeft("a", "killed")
    assert tell(coordinator, *([*stored, left] if early else [left, *stored])) == []
    assert [coordinator.state.member(t).length for t in (A, B)] == [9, 3]
    assert tell(coordinator, stored[1], e.TrajectoryInterrupted(A, "a", 0, 4)) == []
    assert coordinator.state.member(A).length == 9, "what is stored does not get less"
    tell(coordinator, e.InstanceJoined("b", 0, 2, 10_000))
    assert coordinator.state.instances["b"].assigned == {A: 5 + 9, B: 5 + 3}
    tell(coordinator, e.TrajectoryInterrupted(A, "a", 0, 99))
    assert coordinator.state.member(A).length == 9, "b has it: the word of another does not count"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["synchronous", "partial", "rhymeflow"]))
def test_batches_in_the_order_of_requests_are_the_first_groups_that_are_left(seed, name):
    """Law 4, as far as the coordinator goes: whatever finishes first."""
    order = {"batch_order": "requested", "max_staleness": 2 * (name != "synchronous")}
    plan = a_plan(num_batches=5, filter_zero_variance=True, **order)
    runtime = run(plan, a_schedule(name), seed=seed, disorder=0.5, duplicates=0.3, crashes=1)
    trained = [group for batch in runtime.batches for group in sorted(batch)]
    assert trained == [group for group in range(max(trained) + 1) if group not in runtime.dropped]


# -- what never was --------------------------------------------------------------------------------


def nonsense(rng: random.Random, state) -> object:
    """An event about what never was, or was before, that must change nothing."""
    group = rng.choice([*state.groups, 10**6])
    unknown = TrajectoryId(group, rng.choice([-1, -2, 99]))
    real = TrajectoryId(group, 0)
    events = [
        e.TrajectoryFinished(unknown, "rollout-0", 3, "stop"),
        e.TrajectoryInterrupted(unknown, "rollout-0", 1, 9),
        e.TrajectoryRewarded(unknown, 1.0),
        e.RewardFailed(unknown, "broken"),
        e.ProgramLost(unknown, "gone"),
        e.TrajectoryFinished(real, "nobody", 3, "stop"),
        e.Snapshot("nobody", 5, (real,), 77, 3.0),
        e.Pulled("nobody", 1, 9),
        e.Evaluated("nobody", 0, 0.5),
        e.InstanceLeft("nobody", "killed"),
        e.VersionPublished((state.published or 0) + 5),
    ]
    member = state.member(real)
    if member is not None and member.instance is not None:
        events.append(e.TrajectoryInterrupted(real, "nobody", 3, 9))
    if state.published is not None:
        events += [e.LearnerReady(7), e.VersionPublished(state.published)]
    if state.next_group:
        events.append(e.GroupCreated(rng.randrange(state.next_group), 5, 0, 50))
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
        told = [nonsense(rng, replayed.state)] + [earlier] * (not isinstance(earlier, e.Tick))
        for extra in told:
            assert replayed.handle(extra) == [], extra
        invariants.check(replayed.state)
    assert commands == runtime.commands


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_next_batch_begins_while_a_version_is_published_if_the_learner_can(overlaps):
    """It accumulates one part after the other, whenever the version is there."""
    sizes = {"groups": 6, "groups_per_batch": 3, "num_generations": 1, "max_staleness": 1}
    coordinator, _ = begun(instances=(("a", 9),), accumulate_early=True, **sizes)
    found = tell(coordinator, *(each for group in range(4) for each in done(group)))
    assert c.Train(0, (0, 1, 2), ((0,),) * 3, ()) in found
    said = (e.Accumulated(1, 0),) if overlaps else ()
    for due in (overlaps, False):
        assert (accumulated(tell(coordinator, *said)) == [(3,)]) == due
    more = tell(coordinator, e.VersionPublished(1), *done(4))
    assert accumulated(more) == ([] if overlaps else [(3, 4)])
    found = tell(coordinator, e.Accumulated(1, 1))
    assert accumulated(found) == ([(4,)] if overlaps else [])


def accumulated(commands):
    return [each.groups for each in commands if isinstance(each, c.Accumulate)]
