"""Pairs a mind with a fake body: facts arrive in any order a real one could produce.

The fake body keeps its own books (which version each response was started and continued at), so
that what it asserts about the bound is seen from outside the mind.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rhymeflow.core import invariants
from rhymeflow.core.commands import Command, Draw, Drop, Evaluate, Finish, Pull, Route, Train
from rhymeflow.core.coordinator import Coordinator, Plan
from rhymeflow.core.events import (
    Evaluated,
    Event,
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


@dataclass
class FakeInstance:
    name: str
    capacity: int
    version: int = 0
    inbox: deque[Command] = field(default_factory=deque)
    running: list[TrajectoryId] = field(default_factory=list)
    evaluating: int | None = None
    last_number: int = 0


class FakeBody:
    """Carries out a mind's commands in an order that `choose` picks, until `Finish`.

    Args:
        choose: given how many things could happen next (>= 1), the index of the one that does.
        failures: probability that a reward cannot be had.
        duplicates: probability that a fact is reported twice.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        capacities: tuple[int, ...],
        choose: Callable[[int], int],
        failures: float = 0.0,
        duplicates: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.mind = Coordinator(plan)
        self.plan = plan
        self.choose = choose
        self.random = random.Random(seed)
        self.failures, self.duplicates = failures, duplicates
        self.log: list[Event] = []
        self.commands: list[Command] = []
        self.instances = {
            f"rollout-{i}": FakeInstance(f"rollout-{i}", c) for i, c in enumerate(capacities)
        }
        self.draws: deque[Event] = deque()  # the data reports prompts in order; ...
        self.facts: list[Event] = [LearnerReady(0)]  # ... of all else nothing is promised
        self.facts += [InstanceJoined(i.name, 0, i.capacity) for i in self.instances.values()]
        self.published, self.serial, self.training = 0, 0, None
        self.started: dict[TrajectoryId, int] = {}
        self.batches: list[tuple[int, ...]] = []
        self.staleness: list[int] = []
        self.dropped: dict[int, str] = {}
        self.evaluated: list[int] = []
        self.finished = False

    def run(self, max_events: int = 200_000) -> FakeBody:
        for _ in range(max_events):
            if self.finished:
                return self
            moves = self._moves()
            assert moves, "deadlock: nothing can happen and the run is not finished"
            moves[self.choose(len(moves))]()
        raise AssertionError("the run does not end")

    # -- what can happen next ------------------------------------------------------------------

    def _moves(self) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = [
            lambda i=i: self._report(self.facts.pop(i)) for i in range(len(self.facts))
        ]
        if self.draws:
            moves.append(lambda: self._report(self.draws.popleft()))
        for instance in self.instances.values():
            if instance.inbox:
                moves.append(lambda i=instance: self._carry_out(i, i.inbox.popleft()))
            moves += [lambda i=instance, t=t: self._finish(i, t) for t in instance.running]
            if instance.evaluating is not None:
                moves.append(lambda i=instance: self._end_evaluation(i))
        if self.training is not None:
            moves.append(self._publish)
        return moves

    def _report(self, event: Event) -> None:
        for _ in range(1 + (self.random.random() < self.duplicates)):
            self.log.append(event)
            commands = self.mind.handle(event, now=float(len(self.log)))
            invariants.check(self.mind)
            self.commands += commands
            for command in commands:
                self._accept(command)

    def _accept(self, command: Command) -> None:
        assert not self.finished, f"{command} after Finish"
        match command:
            case Draw(count):
                for _ in range(count):
                    self.draws.append(GroupDrawn(self.serial, self.serial % 7, 0, 5))
                    self.serial += 1
            case Route() | Pull() | Evaluate():
                self.instances[command.instance].inbox.append(command)
            case Train(version, groups):
                self._check_batch(version, groups)
                self.training = version
            case Drop(group, reason):
                assert group not in self.dropped
                self.dropped[group] = reason
                for instance in self.instances.values():
                    instance.running = [t for t in instance.running if t.group != group]
                    instance.inbox = deque(
                        c
                        for c in instance.inbox
                        if not (isinstance(c, Route) and c.trajectory.group == group)
                    )
            case Finish():
                self.finished = True

    def _check_batch(self, version: int, groups: tuple[int, ...]) -> None:
        assert self.training is None, "two batches in training"
        assert version == len(self.batches) == self.published
        assert len(groups) == self.plan.groups_per_batch
        for group in groups:
            assert group not in self.dropped
            assert all(group not in batch for batch in self.batches), "trained on twice"
            for member in range(self.plan.num_generations):
                age = version - self.started[TrajectoryId(group, member)]
                assert 0 <= age <= self.plan.max_staleness, "law 1"
                self.staleness.append(age)
        self.batches.append(groups)

    def _carry_out(self, instance: FakeInstance, command: Command) -> None:
        assert isinstance(command, Route | Pull | Evaluate)
        assert command.number > instance.last_number, "numbered in order"
        instance.last_number = command.number
        match command:
            case Route(trajectory=trajectory):
                assert trajectory not in self.started, "routed twice"
                assert len(instance.running) < instance.capacity
                self.started[trajectory] = instance.version
                instance.running.append(trajectory)
            case Pull(version=version):
                assert instance.evaluating is None, "a pull would change what is evaluated"
                assert instance.version < version <= self.published
                instance.version = version
                self.facts.append(Pulled(instance.name, command.number, version))
            case Evaluate(version=version):
                assert instance.version == version
                instance.evaluating = version

    def _finish(self, instance: FakeInstance, trajectory: TrajectoryId) -> None:
        instance.running.remove(trajectory)
        self._report(TrajectoryFinished(trajectory, instance.name, 3, "stop"))
        failed = self.random.random() < self.failures
        self.facts.append(
            RewardFailed(trajectory, "broken") if failed else TrajectoryRewarded(trajectory, 1.0)
        )

    def _end_evaluation(self, instance: FakeInstance) -> None:
        assert instance.evaluating is not None
        version, instance.evaluating = instance.evaluating, None
        self.evaluated.append(version)
        self.facts.append(Evaluated(instance.name, version, 0.5))

    def _publish(self) -> None:
        assert self.training is not None
        self.published, self.training = self.training + 1, None
        self.facts.append(VersionPublished(self.published))
