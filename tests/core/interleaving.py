"""The pure coordinator in whatever order things happen: late, repeated, and about what is lost.

Unlike in fake runs (`tests/fake_run`) there are events and commands alone, so a run takes
milliseconds and any plan, schedule and order is tried, also those that no runtime would give. Law 1
is seen from outside: under which version each response was started and continued."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from rhymeflow.core import commands as c
from rhymeflow.core import events as e
from rhymeflow.core.coordinator import Coordinator
from rhymeflow.core.cost import CostModel
from rhymeflow.core.plan import Plan, Schedule
from rhymeflow.core.strategies.base import NoLayout
from rhymeflow.core.strategies.schedules import SCHEDULES
from rhymeflow.core.types import EvaluationId, TrajectoryId
from tests.core import invariants
from tests.core.strategies.fleets import SETTINGS

LONGEST = 6  # tokens of the longest response, less one

COST = CostModel(
    k1=1e-7, k2=0.01, k3=2e-4, c=0.005, k4=0.002,
    prefill_token=1e-4, train_token=1e-4, measure_token=1e-4, train_step=0.1, push=0.1, pull=0.1,
)  # fmt: skip

PLAN = Plan(
    num_batches=3, groups_per_batch=2, num_generations=2, max_length=LONGEST, max_staleness=1,
    batch_order="finished", accumulate_early=False, eval_steps={}, extra_groups=0,
    extra_generations=0, filter_zero_variance=False, max_filtered=8, on_stuck="wait",
    stuck_threshold=1, max_retries=2,
)  # fmt: skip


def a_plan(**changes: object) -> Plan:
    """A small run, with these fields changed."""
    return replace(PLAN, **changes)  # type: ignore[arg-type]


def a_schedule(name: str = "staleflow", **changes: object) -> Schedule:
    """A schedule by name, with its fields changed."""
    bundle = SCHEDULES[name]
    made = Schedule(
        bundle.admission, bundle.routing, bundle.sync, bundle.on_pull, bundle.migration,
        max_inflight_groups=1000, settings=replace(SETTINGS, cost=COST),
        layout=bundle.layout or NoLayout,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


@dataclass
class Instance:
    name: str
    capacity: int
    version: int
    inbox: deque[c.InstanceCommand] = field(default_factory=deque)
    running: dict[TrajectoryId, int] = field(default_factory=dict)
    evaluating: set[EvaluationId] = field(default_factory=set)
    number: int = 0
    clock: float = 0.0
    is_lost: bool = False


class Interleaving:
    """Carries out a coordinator's commands in an order that `choose` picks, until `Finish`.

    Args:
        choose: given how many things could happen next (>= 1), the index of the one that does.
        failures: probability that a reward cannot be had.
        duplicates: probability that an event is reported again, at any later time.
        crashes: how many instances may die; each is replaced by a new one.
        disorder: probability that what an instance or the data says passes what it said before.
        overlaps: probability that the learner can accumulate while it publishes."""

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule | None = None,
        *,
        capacities: tuple[int, ...] = (4, 4),
        choose: Callable[[int], int] | None = None,
        failures: float = 0.0,
        duplicates: float = 0.0,
        crashes: int = 0,
        disorder: float = 0.0,
        overlaps: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.plan, self.schedule = plan, schedule or a_schedule()
        self.coordinator = Coordinator(plan, self.schedule)
        self.choose, self.random = choose or random.Random(seed).randrange, random.Random(seed)
        self.failures, self.duplicates = failures, duplicates
        self.crashes, self.disorder, self.overlaps = crashes, disorder, overlaps
        self.begun: set[int] = set()  # batches that can be accumulated before they can be trained
        self.log: list[e.Event] = []
        self.commands: list[c.Command] = []
        self.due: list[tuple[str, e.Event]] = [("", e.LearnerReady(0))]
        """What has happened and the coordinator has not heard of, with who says it in order."""
        self.has_news = self.finished = False
        self.instances: dict[str, Instance] = {}
        self.published, self.training = 0, None
        self.num_groups = self.num_parts = 0
        self.started: dict[TrajectoryId, int] = {}
        """The least version that a response was generated under."""
        self.stored: dict[TrajectoryId, int] = {}
        self.judged: dict[TrajectoryId, e.Event] = {}  # what came of judging each that is complete
        self.batches: list[tuple[int, ...]] = []
        self.dropped: set[int] = set()
        self.evaluated: list[EvaluationId] = []
        for index, capacity in enumerate(capacities):
            self._join(f"rollout-{index}", capacity)

    def run(self, max_moves: int = 200_000) -> Interleaving:
        for _ in range(max_moves):
            if self.finished:
                assert len(self.batches) == self.plan.num_batches
                assert not self.coordinator.state.groups, "admitted groups that did not end"
                return self
            moves = list(self._moves())
            assert moves, "deadlock: nothing can happen and the run is not finished"
            moves[self.choose(len(moves))]()
        raise AssertionError("the run does not end")

    # -- what can happen next ------------------------------------------------------------------

    def _moves(self) -> Iterator[Callable[[], None]]:
        before = {""}
        for said in self.due:
            if said[0] == "" or said[0] not in before or self.random.random() < self.disorder:
                yield partial(self._report, said)
            before.add(said[0])
        if self.has_news:
            yield self._tick
        if self.training is not None:
            yield self._publish
        for instance in [each for each in self.instances.values() if not each.is_lost]:
            if instance.inbox:
                yield partial(self._carry_out, instance)
            if instance.running:
                yield partial(self._finish, instance)
            if any(length < LONGEST for length in instance.running.values()):
                yield partial(self._go_on, instance)
            for asked in instance.evaluating:
                yield partial(self._end_evaluation, instance, asked)
            if self.crashes:
                yield partial(self._crash, instance)

    def _say(self, event: e.Event, who: str = "") -> None:
        self.due.append((who, event))

    def _report(self, said: tuple[str, e.Event]) -> None:
        self.due.remove(said)
        if self.random.random() < self.duplicates:
            self._say(said[1])
        self.has_news = True
        self._hear(said[1])

    def _tick(self) -> None:
        self._hear(e.Tick())
        self.has_news = self.coordinator.state.has_more

    def _hear(self, event: e.Event) -> None:
        self.log.append(event)
        commands = self.coordinator.handle(event)
        invariants.check(self.coordinator.state)
        self.commands += commands
        for command in commands:
            self._accept(command)

    # -- the coordinator's commands ------------------------------------------------------------

    def _accept(self, command: c.Command) -> None:
        assert not self.finished, f"{command} after Finish"
        match command:
            case c.RequestPrompts(count):
                for _ in range(count):
                    self._create(None)
            case c.RetryPrompt(group):
                assert group in self.dropped
                self._create(group)
            case c.Accumulate(version, groups, members):
                assert self.training is None or version in self.begun, "the learner trains"
                self._check_groups(version, groups, members)
                self.num_parts += 1
                self._say(e.Accumulated(version, self.num_parts))
            case c.Train(version, groups, members):
                assert len(groups) == len(members) == self.plan.groups_per_batch
                assert self.training is None, "two batches in training"
                assert version == self.published
                self._check_groups(version, groups, members)
                self.batches.append(groups)
                self.training, self.num_parts = version, 0
                if self.random.random() < self.overlaps:
                    self.begun.add(version + 1)
                    self._say(e.Accumulated(version + 1, 0))
            case c.Drop(group):
                self._check_not_ended(group)
                self.dropped.add(group)
            case c.FinishEarly(trajectory):
                assert self.stored[trajectory] > 0
                there = [each.running for each in self.instances.values() if not each.is_lost]
                assert not any(trajectory in running for running in there)
                self._judge(trajectory)
            case c.Finish():
                self.finished = True
            case _:
                assert command.instance in self.coordinator.state.instances, "it has left"
                self.instances[command.instance].inbox.append(command)

    def _create(self, repeats: int | None) -> None:
        self._say(e.GroupCreated(self.num_groups, self.num_groups, 0, 5, repeats), "data")
        self.num_groups += 1

    def _judge(self, trajectory: TrajectoryId) -> None:
        """What comes of it is the same each time that it is asked for."""
        if trajectory not in self.judged:
            failed = self.random.random() < self.failures
            rewarded = e.TrajectoryRewarded(trajectory, float(self.random.randrange(2)))
            self.judged[trajectory] = e.RewardFailed(trajectory, "broken") if failed else rewarded
        self._say(self.judged[trajectory])

    def _check_not_ended(self, group: int) -> None:
        trained = (group in batch for batch in self.batches)
        assert group not in self.dropped, "ended twice"
        assert not any(trained), "ended twice"

    def _check_groups(
        self, version: int, groups: tuple[int, ...], members: tuple[tuple[int, ...], ...]
    ) -> None:
        """Of a batch, or of a part of it."""
        assert version == len(self.batches)
        for group, chosen in zip(groups, members, strict=True):
            self._check_not_ended(group)
            assert len(set(chosen)) == self.plan.num_generations
            for member in chosen:
                assert TrajectoryId(group, member) in self.judged
                age = version - self.started[TrajectoryId(group, member)]
                assert 0 <= age <= self.plan.max_staleness, "law 1"

    # -- what instances and the learner do -----------------------------------------------------

    def _carry_out(self, instance: Instance) -> None:
        command = instance.inbox.popleft()
        instance.number += 1
        assert command.number == instance.number, "numbered in order"
        match command:
            case c.Route(trajectory=trajectory):
                self._start(instance, trajectory)
            case c.Interrupt(number=number, trajectories=trajectories):
                for trajectory in filter(instance.running.__contains__, trajectories):
                    self._interrupt(instance, trajectory, number)
            case c.Abort(trajectories=trajectories):
                for trajectory in trajectories:
                    instance.running.pop(trajectory, None)
            case c.Pull(number=number, version=version):
                assert not instance.evaluating, "a pull would change what is evaluated"
                assert version <= self.published
                assert self.schedule.on_pull == "keep" or not instance.running
                got = self.random.choice([version, self.published])
                instance.version = max(instance.version, got)
                self._say(e.Pulled(instance.name, number, instance.version), instance.name)
            case c.Evaluate(version=version, suite=suite):
                assert instance.version >= version
                assert (version, suite) not in instance.evaluating, "commanded twice"
                instance.evaluating.add(EvaluationId(version, suite))
        self._snapshot(instance)

    def _start(self, instance: Instance, trajectory: TrajectoryId) -> None:
        for other in self.instances.values():
            assert other.is_lost or trajectory not in other.running, "on two instances"
        length = self.stored.get(trajectory, 0)
        if trajectory in self.judged:  # one that is lost was the first to end it
            said = e.TrajectoryFinished(trajectory, instance.name, length + 1, "stop")
            self._say(said, instance.name)
            return
        # An instance may hold a newer version than the coordinator knows yet, so a later segment's
        # can be lower than the first's; what counts for the bound is the least.
        known = self.started.get(trajectory, instance.version)
        self.started[trajectory] = min(known, instance.version)
        instance.running[trajectory] = length

    def _interrupt(self, instance: Instance, trajectory: TrajectoryId, number: int) -> None:
        length = instance.running.pop(trajectory)
        self.stored[trajectory] = max(length, self.stored.get(trajectory, 0))
        self._say(e.TrajectoryInterrupted(trajectory, instance.name, number, length), instance.name)

    def _snapshot(self, instance: Instance) -> None:
        waiting = tuple(list(instance.running)[instance.capacity :])
        kv_tokens = sum(5 + length for length in instance.running.values())
        seen = instance.name, instance.number, waiting, kv_tokens, instance.clock
        self._say(e.Snapshot(*seen), instance.name)

    def _go_on(self, instance: Instance) -> None:
        instance.clock += 1
        for trajectory, length in instance.running.items():
            instance.running[trajectory] = min(length + 1, LONGEST)
        self._snapshot(instance)

    def _finish(self, instance: Instance) -> None:
        trajectory = self.random.choice(list(instance.running))
        length = instance.running.pop(trajectory) + 1
        said = e.TrajectoryFinished(trajectory, instance.name, length, "stop")
        self._say(said, instance.name)
        self._judge(trajectory)

    def _end_evaluation(self, instance: Instance, asked: EvaluationId) -> None:
        instance.evaluating.remove(asked)
        self.evaluated.append(asked)
        name, (version, suite) = instance.name, asked
        self._say(e.Evaluated(name, version, 0.5, suite, held=instance.version), name)

    def _crash(self, instance: Instance) -> None:
        self.crashes -= 1
        instance.is_lost = True
        if self.random.random() < 0.5:  # what it has generated so far had been stored
            for trajectory in list(instance.running):
                self._interrupt(instance, trajectory, 0)
        self._say(e.InstanceLeft(instance.name, "killed"), instance.name)
        self._join(f"{instance.name}.{self.crashes}", instance.capacity)

    def _join(self, name: str, capacity: int) -> None:
        self.instances[name] = Instance(name, capacity, self.published)
        self._say(e.InstanceJoined(name, self.published, capacity, 10_000))

    def _publish(self) -> None:
        self.published, self.training = len(self.batches), None
        self._say(e.VersionPublished(self.published))
