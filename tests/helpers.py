"""Pairs a coordinator with a fake runtime: events arrive in any order a real one could produce.

The fake runtime keeps its own state (under which version each response was started and continued,
where it is), so that what it asserts about the laws is seen from outside the coordinator.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

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

LONGEST = 6
"""Tokens of the longest response, less one."""

COST = CostModel(
    k1=1e-7, k2=0.01, k3=2e-4, c=0.005, k4=0.002,
    prefill_token=1e-4, train_token=1e-4, measure_token=1e-4, train_step=0.1, push=0.1, pull=0.1,
)  # fmt: skip

PLAN = Plan(
    num_batches=3,
    groups_per_batch=2,
    num_generations=2,
    max_length=LONGEST,
    max_staleness=1,
    batch_order="finished",
    accumulate_early=False,
    eval_steps={},
    extra_groups=0,
    extra_generations=0,
    filter_zero_variance=False,
    max_filtered=8,
    on_stuck="wait",
    stuck_threshold=1,
    max_retries=2,
)


def a_plan(**changes: object) -> Plan:
    """A small run, with these fields changed."""
    return replace(PLAN, **changes)  # type: ignore[arg-type]


def a_schedule(name: str = "staleflow", **changes: object) -> Schedule:
    """A schedule by name, with its fields changed."""
    bundle = SCHEDULES[name]
    made = Schedule(
        name, bundle.admission, bundle.routing, bundle.sync, bundle.on_pull, bundle.migration,
        max_inflight_groups=1000, settings=replace(SETTINGS, cost=COST), max_interrupts=512,
        pulls_to_evaluate=True,
        layout=bundle.layout or NoLayout,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


@dataclass
class FakeInstance:
    name: str
    capacity: int
    version: int
    inbox: deque[c.Command] = field(default_factory=deque)
    outbox: deque[e.Event] = field(default_factory=deque)
    running: dict[TrajectoryId, int] = field(default_factory=dict)
    evaluating: set[EvaluationId] = field(default_factory=set)
    last_number: int = 0
    clock: float = 0.0
    commanded: int = 0
    """The version it will hold after all its commands, as far as the coordinator can know."""
    alive: bool = True


class FakeRuntime:
    """Carries out a coordinator's commands in an order that `choose` picks, until `Finish`.

    Args:
        choose: given how many things could happen next (>= 1), the index of the one that does.
        failures: probability that a reward cannot be had.
        duplicates: probability that an event is reported twice, and a command delivered twice.
        crashes: how many instances and learners may die; each is replaced by a new one.
        disorder: probability that the coordinator hears of an event at any later time, after what
            happened later, and of a duplicate then too. An instance may then die at any moment.
        turns: the most turns of a trajectory; 1: nothing has an environment.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule | None = None,
        *,
        capacities: tuple[int, ...],
        choose: Callable[[int], int],
        failures: float = 0.0,
        duplicates: float = 0.0,
        crashes: int = 0,
        disorder: float = 0.0,
        turns: int = 1,
        seed: int = 0,
    ) -> None:
        self.schedule = schedule or a_schedule()
        self.coordinator = Coordinator(plan, self.schedule)
        self.plan, self.choose, self.random = plan, choose, random.Random(seed)
        self.failures, self.duplicates, self.crashes = failures, duplicates, crashes
        self.disorder, self.turns = disorder, turns
        self.late: list[e.Event] = []
        """What has happened and the coordinator has not heard of."""
        self.log: list[e.Event] = []
        self.commands: list[c.Command] = []
        self.instances: dict[str, FakeInstance] = {}
        # The data reports prompts in order; of rewards and such nothing is promised.
        self.created: deque[e.Event] = deque()
        self.events: list[e.Event] = [e.LearnerReady(0)]
        self.published, self.group_id, self.training = 0, 0, None
        self.parts: list[tuple[int, ...]] = []
        """Groups of the next batch that the learner was given early."""
        self.accumulating: e.Accumulated | None = None
        """What it says when it is done with the last of them."""
        self.num_learners = 0
        self.prompt_of: dict[int, int] = {}
        self.num_prompts = 0
        self.begun: dict[TrajectoryId, int] = {}
        """V_traj, as the coordinator can know it."""
        self.started: dict[TrajectoryId, int] = {}
        """The least version that a response was really generated under."""
        self.stored: dict[TrajectoryId, int] = {}
        self.turn: dict[TrajectoryId, int] = {}
        """Turns that have ended, of trajectories whose environment is open."""
        self.asked: set[TrajectoryId] = set()
        """Those whose environment has not answered yet, as far as the coordinator has heard."""
        self.closed: set[TrajectoryId] = set()
        """Trajectories whose environment was, and is not any more."""
        self.complete: dict[TrajectoryId, e.Event] = {}
        """And what came of judging them."""
        self.batches: list[tuple[int, ...]] = []
        self.staleness: list[int] = []
        self.dropped: dict[int, tuple[str, str]] = {}
        self.evaluated: list[EvaluationId] = []
        self.finished = False
        self.news = False  # events since the last tick
        for index, capacity in enumerate(capacities):
            self._join(f"rollout-{index}", capacity)

    def run(self, max_moves: int = 200_000) -> FakeRuntime:
        for _ in range(max_moves):
            if self.finished:
                self._check_end()
                return self
            moves = self._moves()
            assert moves, "deadlock: nothing can happen and the run is not finished"
            moves[self.choose(len(moves))]()
        raise AssertionError("the run does not end")

    def count(self, kind: type) -> int:
        return sum(isinstance(command, kind) for command in self.commands)

    # -- what can happen next ------------------------------------------------------------------

    def _moves(self) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = [
            lambda i=i: self._report(self.events.pop(i)) for i in range(len(self.events))
        ]
        moves += [lambda i=i: self._hear(self.late.pop(i)) for i in range(len(self.late))]
        if self.news:
            moves.append(self._tick)
        if self.created:
            moves.append(lambda: self._report(self.created.popleft()))
        for instance in self.instances.values():
            moves += self._moves_of(instance)
        if self.training is not None:
            moves.append(self._publish)
        if self.accumulating is not None:
            moves.append(self._end_part)
        if self.crashes and self.parts:
            moves.append(self._lose_learner)
        return moves

    def _moves_of(self, instance: FakeInstance) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = []
        if instance.outbox:
            moves.append(lambda: self._deliver(instance))
        if not instance.alive:
            return moves
        if instance.inbox:
            moves.append(lambda: self._carry_out(instance, instance.inbox.popleft()))
        if instance.running:
            moves.append(lambda: self._finish(instance))
        if any(length < LONGEST for length in instance.running.values()):
            moves.append(lambda: self._go_on(instance))
        for asked in instance.evaluating:
            moves.append(lambda asked=asked: self._end_evaluation(instance, asked))
        if self.crashes and (instance.running or instance.inbox or self.disorder):
            moves.append(lambda: self._crash(instance))
        return moves

    def _tick(self) -> None:
        self.news = False
        self._hear(e.Tick())
        self.news = self.coordinator.state.has_more

    def _report(self, event: e.Event) -> None:
        if self.disorder and self.random.random() < self.disorder:
            self.late.append(event)
        else:
            self._hear(event)

    def _hear(self, event: e.Event) -> None:
        self.news = self.news or not isinstance(event, e.Tick)
        if isinstance(event, e.Pulled):
            instance = self.instances[event.instance]
            instance.commanded = max(instance.commanded, event.version)
        again = self.random.random() < self.duplicates
        if again and self.disorder and not isinstance(event, e.Tick):
            self.late.append(event)
        for _ in range(1 + again):
            self.log.append(event)
            if isinstance(event, e.LearnerReady):
                self.parts, self.accumulating = [], None
                self.num_learners += 1
            self._converse(event)
            commands = self.coordinator.handle(event)
            invariants.check(self.coordinator.state)
            self.commands += commands
            for command in commands:
                self._accept(command)

    def _deliver(self, instance: FakeInstance) -> None:
        event = instance.outbox.popleft()
        match event:  # what one said that is known to have left is passed over, or it was stored
            case e.TrajectoryInterrupted(trajectory=trajectory, length=length):
                self.stored[trajectory] = max(length, self.stored.get(trajectory, 0))
            case e.TrajectoryFinished(trajectory=trajectory) if instance.alive or self.disorder:
                self._judge(trajectory)
        self._report(event)

    def _converse(self, event: e.Event) -> None:
        """What is stored when the coordinator hears of a turn or an answer, and who is asked."""
        match event:
            case e.TurnEnded(trajectory, name, turn, length):
                member = self.coordinator.state.member(trajectory)
                if member is None or (member.instance, member.turn + 1) != (name, turn):
                    return  # the instance is lost, or this came twice
                assert trajectory not in self.closed
                self.turn[trajectory], self.stored[trajectory] = turn, length
                self.asked.add(trajectory)
                self.events.append(self._answer(trajectory, turn, length))
            case e.Observed(trajectory, turn, length) if self.turn.get(trajectory) == turn:
                self.stored[trajectory] = max(length, self.stored[trajectory])
                self.asked.discard(trajectory)
            case e.EpisodeEnded(trajectory) if self._close(trajectory):
                self._judge(trajectory)
            case e.EnvironmentFailed(trajectory) | e.TrajectoryFinished(trajectory):
                self._close(trajectory)

    def _answer(self, trajectory: TrajectoryId, turn: int, length: int) -> e.Event:
        if self.random.random() < self.failures:
            return e.EnvironmentFailed(trajectory, turn, "broken")
        if turn == self._num_turns(trajectory) - 1 and self.random.random() < 0.5:
            return e.EpisodeEnded(trajectory, turn, "stop")
        return e.Observed(trajectory, turn, length + self.random.randrange(3))

    def _num_turns(self, trajectory: TrajectoryId) -> int:
        return 1 + (7 * trajectory.group + 3 * trajectory.member) % self.turns

    def _close(self, trajectory: TrajectoryId) -> bool:
        """Close its environment; whether it was open."""
        if self.turn.pop(trajectory, None) is None:
            return False
        self.closed.add(trajectory)
        return True

    def _judge(self, trajectory: TrajectoryId) -> None:
        if trajectory in self.complete:
            assert self.disorder, "complete twice"
            return
        failed = self.random.random() < self.failures
        rewarded = e.TrajectoryRewarded(trajectory, float(self.random.randrange(2)))
        self.complete[trajectory] = e.RewardFailed(trajectory, "broken") if failed else rewarded
        self.events.append(self.complete[trajectory])

    # -- the coordinator's commands ------------------------------------------------------------

    def _accept(self, command: c.Command) -> None:
        assert not self.finished, f"{command} after Finish"
        match command:
            case c.RequestPrompts(count):
                for _ in range(count):
                    self._create(self.num_prompts, None)
                    self.num_prompts += 1
            case c.RetryPrompt(group):
                assert group in self.dropped
                self._create(self.prompt_of[group], group)
            case c.Accumulate(version, groups, members):
                self._check_groups(version, groups, members)
                # The word of one that was lost may be taken for that of the next.
                assert self.accumulating is None or self.num_learners > 1, "it is at others"
                assert not set(groups) & {group for part in self.parts for group in part}
                self.parts.append(groups)
                self.accumulating = e.Accumulated(version, len(self.parts))
            case c.Train(version, groups, members, parts):
                assert parts == tuple(map(len, self.parts))
                assert groups[: sum(parts)] == tuple(group for part in self.parts for group in part)
                self._check_batch(version, groups, members)
                self.training, self.parts, self.accumulating = version, [], None
            case c.Drop(group, ending, reason):
                self._check_not_ended(group)
                self.dropped[group] = (ending, reason)
            case c.CloseEnvironments(trajectories):
                assert all([self._close(trajectory) for trajectory in trajectories])
            case c.FinishEarly(trajectory):
                self._close(trajectory)
                assert self.stored[trajectory] > 0
                assert not any(i.alive and trajectory in i.running for i in self.instances.values())
                if trajectory in self.complete:
                    assert self.disorder
                    self.events.append(self.complete[trajectory])
                self._judge(trajectory)
            case c.Finish():
                self.finished = True
            case _:
                instance = self.instances[command.instance]
                if not instance.alive and self.disorder:
                    return  # the coordinator is to hear of it yet
                assert instance.alive, f"{command} to one that left"
                self._check_instance_command(instance, command)
                instance.inbox += [command] * (1 + (self.random.random() < self.duplicates))

    def _check_instance_command(self, instance: FakeInstance, command: c.Command) -> None:
        match command:
            case c.Abort(trajectories=trajectories):
                for trajectory in trajectories:
                    self._close(trajectory)
            case c.Pull(version=version):
                assert instance.commanded < version <= self.published
                instance.commanded = version
            case c.Route(trajectory=trajectory, version=version):
                assert trajectory not in self.asked, "its environment has not answered"
                assert version == instance.commanded, "V_traj, as the log will have it"
                begun = self.begun.setdefault(trajectory, instance.commanded)
                assert instance.commanded >= begun, (
                    "goes on under weights older than it began under"
                )

    def _create(self, prompt: int, repeats: int | None) -> None:
        self.created.append(e.GroupCreated(self.group_id, prompt, 0, 5, repeats))
        self.prompt_of[self.group_id] = prompt
        self.group_id += 1

    def _check_not_ended(self, group: int) -> None:
        assert group not in self.dropped, "ended twice"
        assert all(group not in batch for batch in self.batches), "ended twice"

    def _check_batch(
        self, version: int, groups: tuple[int, ...], members: tuple[tuple[int, ...], ...]
    ) -> None:
        assert len(groups) == len(members) == self.plan.groups_per_batch
        self.staleness += self._check_groups(version, groups, members)
        self.batches.append(groups)

    def _check_groups(
        self, version: int, groups: tuple[int, ...], members: tuple[tuple[int, ...], ...]
    ) -> list[int]:
        """Of a batch, or of a part of it; the staleness of each response."""
        assert self.training is None, "two batches in training"
        assert version == len(self.batches) == self.published
        found = []
        for group, chosen in zip(groups, members, strict=True):
            self._check_not_ended(group)
            assert len(set(chosen)) == self.plan.num_generations
            for member in chosen:
                trajectory = TrajectoryId(group, member)
                assert trajectory in self.complete
                age = version - self.started[trajectory]
                assert 0 <= age <= self.plan.max_staleness, "law 1"
                found.append(age)
        return found

    def _carry_out(self, instance: FakeInstance, command: c.Command) -> None:
        if command.number == instance.last_number:  # type: ignore[union-attr]
            return  # delivered twice
        assert command.number == instance.last_number + 1, "numbered in order"  # type: ignore[union-attr]
        instance.last_number += 1
        match command:
            case c.Route(trajectory=trajectory):
                self._start(instance, trajectory)
            case c.Interrupt(number=number, trajectories=trajectories):
                for trajectory in trajectories:
                    if trajectory in instance.running:
                        length = instance.running.pop(trajectory)
                        instance.outbox.append(
                            e.TrajectoryInterrupted(trajectory, instance.name, number, length)
                        )
            case c.Abort(trajectories=trajectories):
                for trajectory in trajectories:
                    instance.running.pop(trajectory, None)
            case c.Pull(number=number, version=version):
                assert not instance.evaluating, "a pull would change what is evaluated"
                assert version <= self.published
                if self.schedule.on_pull != "keep":
                    assert not instance.running, "what runs was to end or to be interrupted"
                got = self.random.choice([version, self.published])
                instance.version = max(instance.version, got)
                instance.outbox.append(e.Pulled(instance.name, number, instance.version))
            case c.Evaluate(version=version, suite=suite):
                assert instance.version >= version
                assert (version, suite) not in instance.evaluating, "commanded twice"
                instance.evaluating.add(EvaluationId(version, suite))
        self._snapshot(instance)

    def _start(self, instance: FakeInstance, trajectory: TrajectoryId) -> None:
        for other in self.instances.values():
            assert not (other.alive and trajectory in other.running), "on two instances"
        if trajectory in self.complete:  # said by one that left, as the coordinator heard before
            assert self.disorder
            length = self.stored.get(trajectory, 0) + 1
            instance.outbox.append(e.TrajectoryFinished(trajectory, instance.name, length, "stop"))
            return
        # An instance may hold a newer version than the coordinator knows yet, so a later segment's
        # can be lower than the first's; what counts for the bound is the least.
        known = self.started.get(trajectory, instance.version)
        self.started[trajectory] = min(known, instance.version)
        instance.running[trajectory] = self.stored.get(trajectory, 0)

    def _snapshot(self, instance: FakeInstance) -> None:
        waiting = tuple(list(instance.running)[instance.capacity :])
        kv_tokens = sum(5 + length for length in instance.running.values())
        number = instance.last_number
        instance.outbox.append(
            e.Snapshot(instance.name, number, waiting, kv_tokens, instance.clock)
        )

    # -- what instances and the learner do -----------------------------------------------------

    def _go_on(self, instance: FakeInstance) -> None:
        instance.clock += 1
        for trajectory in instance.running:
            length = instance.running[trajectory]
            instance.running[trajectory] = max(length, min(length + 1, LONGEST))
        if self.random.random() < 0.3:
            self._snapshot(instance)

    def _finish(self, instance: FakeInstance) -> None:
        trajectory = self.random.choice(list(instance.running))
        length = instance.running.pop(trajectory) + 1
        turn = self.turn.get(trajectory, 0) + 1
        if turn < self._num_turns(trajectory):
            instance.outbox.append(e.TurnEnded(trajectory, instance.name, turn, length))
        else:
            instance.outbox.append(e.TrajectoryFinished(trajectory, instance.name, length, "stop"))

    def _end_evaluation(self, instance: FakeInstance, asked: EvaluationId) -> None:
        instance.evaluating.remove(asked)
        self.evaluated.append(asked)
        name, (version, suite) = instance.name, asked
        instance.outbox.append(e.Evaluated(name, version, 0.5, suite, held=instance.version))

    def _crash(self, instance: FakeInstance) -> None:
        self.crashes -= 1
        instance.alive = False
        if self.random.random() < 0.5:  # what it has generated so far had been stored
            for trajectory, length in instance.running.items():
                self.stored[trajectory] = max(length, self.stored.get(trajectory, 0))
                self._report(e.TrajectoryInterrupted(trajectory, instance.name, 0, length))
        self._report(e.InstanceLeft(instance.name, "killed"))
        self._join(f"{instance.name}.{self.crashes}", instance.capacity)

    def _join(self, name: str, capacity: int) -> None:
        self.instances[name] = FakeInstance(
            name, capacity, self.published, commanded=self.published
        )
        self.events.append(e.InstanceJoined(name, self.published, capacity, 10_000))

    def _publish(self) -> None:
        assert self.training is not None
        self.published, self.training = self.training + 1, None
        self.events.append(e.VersionPublished(self.published))

    def _end_part(self) -> None:
        assert self.accumulating is not None
        self.events.append(self.accumulating)
        self.accumulating = None

    def _lose_learner(self) -> None:
        self.crashes -= 1
        self.accumulating = None
        self.events.append(e.LearnerReady(self.published))

    def _check_end(self) -> None:
        assert len(self.batches) == self.plan.num_batches
        assert not self.coordinator.state.groups, "admitted groups that did not end"
        assert not self.turn, "environments that nobody closed"
