"""Random small runs on random small clusters: each ends, keeps the laws, and is the same twice.

That the bound holds and every group ends once is checked by the audit, in every run; here the
audit itself is shown to see what it is there for."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.config import SimulationConfig
from rhymeflow.config.run import RunConfig
from rhymeflow.core.commands import Drop, Train
from rhymeflow.core.cost import CostModel
from rhymeflow.core.types import TrajectoryId
from rhymeflow.sim.audit import Audit, InvariantViolation, RequestedGroup
from rhymeflow.sim.cluster import Cluster
from rhymeflow.sim.continuous_batching import Hardware
from rhymeflow.sim.drafts import Drafts
from rhymeflow.sim.faults import Death, Recovery
from rhymeflow.sim.response import Observation, Response
from rhymeflow.sim.timeline import Timeline
from rhymeflow.sim.workload import ResponseSpec, SimulatedPrompt, uniform
from tests.core import invariants
from tests.core.interleaving import a_plan, a_schedule

COST = CostModel(
    k1=1e-5, k2=6e-3, k3=1e-3, c=2e-3, k4=1e-3, prefill_token=1e-4,
    train_token=1e-4, measure_token=1e-4, train_step=0.1, push=0.05, pull=0.05,
)  # fmt: skip


class Lengths:
    """Responses of 1 to 60 tokens, prompts of 1 to 20, with turns up to 3 observations, by hash."""

    def __init__(self, seed: int, *, turns: bool = False) -> None:
        self.seed, self.turns = seed, turns

    def prompt(self, number: int) -> SimulatedPrompt:
        return SimulatedPrompt(
            number % 7, number // 7, 1 + int(20 * uniform(self.seed, b"p", number % 7))
        )

    def response(self, row: int, epoch: int, member: int) -> ResponseSpec:
        def draw(turn: int, below: int) -> int:
            return int(below * uniform(self.seed, b"a", row, epoch, member, turn))

        length = 1 + int(60 * uniform(self.seed, b"l", row, epoch, member) ** 2)
        reward = float(uniform(self.seed, b"r", row, epoch, member) < 0.4)
        ends = sorted({1 + draw(turn, length) for turn in range(draw(9, 4))} - {length})
        seen = [Observation(end, draw(end, 7), draw(-end, 3) / 10) for end in ends * self.turns]
        return ResponseSpec(length, reward, seen)


def a_recovery(rng: random.Random) -> Recovery:
    """How what dies comes back, on the scale of the runs, which last some seconds."""
    return Recovery(
        detection=rng.choice([0.0, 0.05]),
        instance=rng.choice([0.0, 0.01, 0.5]),
        learner=rng.choice([0.0, 0.1, 0.5]),
        store=rng.choice([1e6, 0.02, 0.2]),
        checkpoint_copy=rng.choice([0.0, 0.05]),
        checkpoint_write=rng.choice([0.0, 0.3]),
        run=RunConfig(save_seconds=rng.choice([0.0, 0.2]), save_steps=rng.choice([0, 0, 2])),
        evaluates=lambda version: version % 2 == 0,
    )


def some_failures(rng: random.Random, num_instances: int) -> list[Death]:
    """Of each kind, in order; some come together, or to who is away."""
    victims = [*range(num_instances), "learner", "devices", "controller"]
    count = rng.choice([0, 0, 1, 4, 12])
    times = sorted(rng.choice([1.0, rng.uniform(0, 3)]) for _ in range(count))
    return [Death(at, rng.choice(victims)) for at in times]


def a_cluster(
    seed: int, timeline: Timeline | None = None, *, can_die: bool = True, **dying: object
) -> Cluster:
    """Everything about it is drawn from the seed."""
    rng = random.Random(seed)
    name = rng.choice(["synchronous", "one_step", "bounded", "partial", "staleflow"])
    bound = {"synchronous": 0, "one_step": 1}.get(name, rng.randint(0, 3))
    changes = {}
    if name in ("partial", "staleflow"):
        changes["on_pull"] = rng.choice(["keep", "reroute"])
    plan = a_plan(
        num_batches=rng.randint(1, 5), groups_per_batch=rng.randint(1, 4),
        num_generations=rng.randint(1, 4), max_staleness=bound,
        extra_groups=rng.choice([0, 0, 1, 2]), extra_generations=rng.choice([0, 0, 1, 2]),
        filter_zero_variance=rng.random() < 0.4, max_filtered=rng.randint(1, 6),
        on_stuck=rng.choice(["wait", "retry", "truncate"]), stuck_threshold=rng.randint(1, 2),
        max_retries=rng.randint(0, 2),
    )  # fmt: skip
    hardware = Hardware(
        cost=COST, capacity=rng.randint(1, 6), kv_capacity=rng.choice([81, 150, 100_000]),
        watermark=rng.choice([0, 5]), max_prefill_tokens=rng.choice([7, 64]), max_length=60,
        keep_cache=rng.random() < 0.5,
        drafts=Drafts(COST, max_draft=0, kv_capacity=1),
    )  # fmt: skip
    latencies = SimulationConfig(
        tick_seconds=rng.choice([1e-4, 0.03]), snapshot_seconds=rng.choice([0.01, 0.3]),
        message_seconds=rng.choice([0.0, 1e-3, 0.2]), reward_seconds=rng.choice([0.0, 1e-3, 0.2]),
    )  # fmt: skip
    num_instances = rng.randint(1, 4)
    faults = random.Random(seed)
    if can_die:
        dying = {"recovery": a_recovery(faults), "failures": some_failures(faults, num_instances)}
        plan = replace(plan, accumulate_early=faults.random() < 0.5)
    if rng.random() < 0.5:
        hardware = replace(
            hardware,
            drafts=Drafts(
                COST, acceptance=(0.3, 0.8), max_draft=rng.choice([1, 8]),
                kv_capacity=hardware.kv_capacity,
            ),
        )  # fmt: skip
    turns = can_die and seed % 2 == 1
    if turns:
        hardware = replace(hardware, kv_capacity=hardware.kv_capacity + 3 * 6)
    return Cluster(
        plan, a_schedule(name, **changes), hardware, Lengths(seed, turns=turns), latencies,
        num_instances=num_instances, timeline=timeline, **dying,
    )  # fmt: skip


def story(cluster: Cluster) -> tuple:
    return (
        cluster.steps, cluster.events, cluster.commands, cluster.ticks, cluster.audit.outcomes,
        cluster.audit.batches, cluster.audit.staleness, [i.tally for i in cluster.all_instances],
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_every_run_ends_and_keeps_the_laws(seed):
    cluster = a_cluster(seed)
    cluster.run()
    invariants.check(cluster.coordinator.state)
    assert cluster.learner.busy <= cluster.now + 1e-6
    assert sum(cluster.audit.staleness.values()) == (
        cluster.plan.num_batches * cluster.plan.groups_per_batch * cluster.plan.num_generations
    )
    ends = [outcome.ending for outcome in cluster.audit.outcomes]
    assert ends.count("consumed") == sum(cluster.audit.staleness.values())
    assert len(ends) == len(cluster.audit.responses)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_the_same_twice_and_whether_it_is_watched_or_not(seed):
    runs = [a_cluster(seed), a_cluster(seed, Timeline())]
    for cluster in runs:
        cluster.run()
    assert story(runs[0]) == story(runs[1])
    timeline = runs[1]._timeline
    for row in [timeline.learner, *timeline.instances]:
        for a, b in pairwise(row.spans):
            assert a.end <= b.start
        whole = list(row.with_idle(timeline.end))
        assert all(a.end == b.start for a, b in pairwise(whole))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_failures_that_come_too_late_change_nothing(seed):
    quiet = a_cluster(seed, can_die=False)
    quiet.run()
    rng = random.Random(seed)
    recovery = replace(a_recovery(rng), checkpoint_copy=0.0)
    late = (Death(quiet.now + 1 + k, "learner") for k in range(10**9))
    watched = a_cluster(seed, can_die=False, recovery=recovery, failures=late)
    watched.run()
    assert story(watched) == story(quiet)


def test_the_random_runs_have_what_is_hard_in_them():
    runs = [a_cluster(seed) for seed in range(150)]
    for cluster in runs:
        cluster.run()
    tallies = [instance.tally for cluster in runs for instance in cluster.all_instances]
    assert sum(tally.preemptions > 0 for tally in tallies) >= 10
    assert sum(tally.interrupts > 0 for tally in tallies) >= 20
    assert sum(len(cluster.all_instances) > cluster.num_instances for cluster in runs) >= 20
    deaths = sum((cluster.deaths.counts for cluster in runs), Counter())
    assert min(deaths[victim] for victim in ("instance", "learner", "devices", "controller")) >= 20
    assert sum(tally.lost > 0 for tally in tallies) >= 20
    responses = [each for cluster in runs for each in cluster.audit.responses.values()]
    assert sum(each.turn > 0 for each in responses) >= 200
    assert sum(not each.is_last_turn for each in responses) >= 20, "none was ended between turns"
    assert sum(cluster.learner.retrained > 0 for cluster in runs) >= 10
    outcomes = {
        (outcome.ending, outcome.reason) for cluster in runs for outcome in cluster.audit.outcomes
    }
    assert {ending for ending, _ in outcomes} == {"consumed", "filtered", "aborted"}
    assert len(outcomes) >= 5
    assert max(max(cluster.audit.staleness) for cluster in runs) >= 2


def test_the_mind_plans_no_more_often_than_it_is_to():
    counts = []
    for tick_seconds in (1e-4, 0.05):
        cluster = a_cluster_of_partial(tick_seconds)
        cluster.run()
        counts.append(cluster.ticks)
        assert cluster.ticks <= 1 + cluster.now / tick_seconds
    assert counts[1] < counts[0] / 2


def admit(audit: Audit, response: Response) -> None:
    if response.id.group == len(audit.groups):
        audit.groups.append(RequestedGroup(SimulatedPrompt(0, 0, response.prompt_tokens)))
    audit.admit(response)


def complete(
    audit: Audit, trajectory: TrajectoryId, version: int, *, length: int = 3, reward: float = 1.0
) -> None:
    """A response that was begun and ended under this version."""
    response = Response(trajectory, 5, length, reward, oldest_version=version, generated=length)
    admit(audit, response)
    audit.complete(trajectory)


def a_ledger(versions: tuple[int, ...], batches: int = 0) -> Audit:
    """Of groups of one response each, complete, begun under these versions; bound 1."""
    size = {"num_generations": 1, "groups_per_batch": len(versions), "num_batches": batches + 1}
    audit = Audit(a_plan(**size, max_staleness=1))
    audit.batches += [None] * batches
    for group, version in enumerate(versions):
        complete(audit, TrajectoryId(group, 0), version)
    return audit


def a_batch(version: int, *groups: int) -> Train:
    return Train(version, groups, ((0,),) * len(groups))


def test_a_batch_within_the_bound():
    """Groups whose trained rewards are equal move nothing; prompts (of 5 tokens) count once."""
    audit = a_ledger((2, 1), batches=2)
    batch = audit.train(a_batch(2, 0, 1))
    assert (batch.responses, batch.response_tokens, batch.tokens) == (2, 6, (0, 16))
    assert audit.staleness == {0: 1, 1: 1}
    audit.close()
    audit = Audit(a_plan(num_generations=2, groups_per_batch=2, max_staleness=0))
    for group, rewards in enumerate(((0.0, 1.0), (1.0, 1.0, 0.0))):
        for member, reward in enumerate(rewards):
            complete(audit, TrajectoryId(group, member), 0, length=10 * group + 3, reward=reward)
    batch = audit.train(Train(0, (0, 1), ((0, 1), (0, 1))))  # the third is surplus
    assert batch.tokens == (5 + 2 * 3, 5 + 2 * 13)
    assert batch.response_tokens == 32


def dropped(audit: Audit) -> Audit:
    audit.drop(Drop(0, "aborted", "why not"))
    return audit


def with_another(audit: Audit, group: int) -> Audit:
    admit(audit, Response(TrajectoryId(group, 1), 5, 30))
    return audit


VIOLATIONS = {
    "too old": (lambda: a_ledger((2, 0), 2).train(a_batch(2, 0, 1)), "2 versions old in batch 2"),
    "too new": (lambda: a_ledger((2, 3), 2).train(a_batch(2, 0, 1)), "-1 versions old in batch 2"),
    "never ended": (lambda: a_ledger((0,)).close(), "did not end"),
    "ended twice": (lambda: dropped(a_ledger((0,))).train(a_batch(0, 0)), "ended twice"),
    "begun again": (lambda: with_another(dropped(a_ledger((0,))), 0), "has ended"),
    "not complete": (
        lambda: with_another(a_ledger((0,)), 0).train(Train(0, (0,), ((1,),))), "not complete"
    ),
    "too few": (lambda: a_ledger((0,)).train(Train(0, (), ())), "size"),
}  # fmt: skip


@pytest.mark.parametrize(("act", "said"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_the_audit_finds(act, said):
    with pytest.raises(InvariantViolation, match=said):
        act()


def test_a_response_never_goes_back_behind_its_version():
    response = Response(TrajectoryId(0, 0), 5, 3, routed_version=2)
    response.continue_under(4)
    response.continue_under(3)
    assert response.oldest_version == 3
    with pytest.raises(AssertionError, match="1 under 2"):
        response.continue_under(1)


def test_a_mind_that_breaks_the_bound_is_found_out():
    """The coordinator gets a bound of 3; the audit holds the run to 0."""
    cluster = a_cluster_of_partial()
    cluster.audit.plan = replace(cluster.plan, max_staleness=0)
    with pytest.raises(InvariantViolation, match="the bound is 0"):
        cluster.run()


def a_cluster_of_partial(tick_seconds: float = 1e-3) -> Cluster:
    cluster = a_cluster(0)
    plan = a_plan(num_batches=6, max_staleness=3)
    return Cluster(
        plan, a_schedule("partial"), replace(cluster.hardware, kv_capacity=1000), Lengths(0),
        SimulationConfig(
            tick_seconds=tick_seconds, snapshot_seconds=0.1, message_seconds=1e-3,
            reward_seconds=1e-3,
        ),
        num_instances=2,
    )  # fmt: skip
