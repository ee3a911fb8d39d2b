"""The mind: facts in, intents out.

    commands = coordinator.handle(event, now)

Holds true: deterministic (the same events give the same commands); plans on what it has already
commanded, so nothing is planned twice; every admitted group ends in exactly one of consumed or
dropped-with-reason (law 2); a fact about something that has ended changes nothing.

Knows no clock (`now` is an argument), no torch, no network, no tokens. The rules of this schedule
are simple: fewest requests first, pull whenever behind. A trajectory is routed only when an
instance has room for it, so what waits, waits here and starts at the freshest version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from rhymeflow.core.commands import Command, Draw, Drop, Evaluate, Finish, Pull, Route, Train
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
from rhymeflow.core.staleness import StalenessBuffers
from rhymeflow.core.types import GroupId, InstanceId, TrajectoryId, Version


@dataclass(frozen=True, slots=True)
class Plan:
    """What the run is to do; the part of the configuration that the mind needs."""

    num_batches: int
    groups_per_batch: int
    num_generations: int
    max_staleness: int
    eval_steps: int | None
    """Evaluate every so many versions (0: at the start and the end only); None: never."""

    def evaluates(self, version: Version) -> bool:
        """Whether held-out prompts are to be answered under `version`."""
        if self.eval_steps is None:
            return False
        if version in (0, self.num_batches):
            return True
        return self.eval_steps > 0 and version % self.eval_steps == 0


@dataclass(slots=True)
class Instance:
    """An instance as it will be once it has carried out what it was told."""

    name: InstanceId
    version: Version
    capacity: int
    commands: int = 0
    assigned: set[TrajectoryId] = field(default_factory=set)
    evaluating: Version | None = None

    @property
    def has_room(self) -> bool:
        """Whether it could decode one trajectory more at once."""
        return len(self.assigned) < self.capacity

    def next_number(self) -> int:
        """The number of the next command to it."""
        self.commands += 1
        return self.commands


@dataclass(slots=True)
class Group:
    """An admitted group: where its members are, and which of them are judged."""

    routed: dict[int, InstanceId] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    rewarded: set[int] = field(default_factory=set)


class Coordinator:
    """The deterministic state machine that decides everything."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.buffers = StalenessBuffers(
            groups_per_batch=plan.groups_per_batch,
            max_staleness=plan.max_staleness,
            num_batches=plan.num_batches,
        )
        self.instances: dict[InstanceId, Instance] = {}
        self.groups: dict[GroupId, Group] = {}
        self.published: Version | None = None
        self.training: Version | None = None
        self.finished = False
        self._drawn: deque[GroupId] = deque()
        self._next_group: GroupId = 0  # the next serial number that the data will give
        self._asked_for = 0  # prompts commanded but not reported yet
        self._num_dropped = 0
        self._unrouted: deque[TrajectoryId] = deque()
        self._evaluations: set[Version] = {
            v for v in range(plan.num_batches + 1) if plan.evaluates(v)
        }

    # -- facts -------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in one fact; return what is to be done. `now` is in seconds since any origin."""
        commands: list[Command] = []
        match event:
            case GroupDrawn():
                self._on_drawn(event)
            case InstanceJoined():
                self._on_joined(event)
            case Pulled():
                self._on_pulled(event)
            case TrajectoryFinished():
                self._on_finished(event)
            case TrajectoryRewarded():
                self._on_rewarded(event)
            case RewardFailed():
                commands += self._on_reward_failed(event)
            case LearnerReady():
                self.published = event.version
            case VersionPublished():
                self._on_published(event)
            case Evaluated():
                self._on_evaluated(event)
        commands += self._plan()
        return commands

    def _on_drawn(self, event: GroupDrawn) -> None:
        if event.group == self._next_group:
            self._next_group += 1
            self._asked_for -= 1
            self._drawn.append(event.group)

    def _on_joined(self, event: InstanceJoined) -> None:
        if event.instance not in self.instances:
            self.instances[event.instance] = Instance(event.instance, event.version, event.capacity)

    def _on_pulled(self, event: Pulled) -> None:
        instance = self.instances[event.instance]
        instance.version = max(instance.version, event.version)  # it may have got a newer one

    def _on_finished(self, event: TrajectoryFinished) -> None:
        group = self.groups.get(event.trajectory.group)
        if group is None or event.trajectory.member in group.finished:
            return
        group.finished.add(event.trajectory.member)
        self.instances[group.routed[event.trajectory.member]].assigned.discard(event.trajectory)

    def _on_rewarded(self, event: TrajectoryRewarded) -> None:
        group = self.groups.get(event.trajectory.group)
        if group is None or event.trajectory.member in group.rewarded:
            return
        assert event.trajectory.member in group.finished, event
        group.rewarded.add(event.trajectory.member)
        if len(group.rewarded) == self.plan.num_generations:
            self.buffers.occupy(event.trajectory.group)

    def _on_reward_failed(self, event: RewardFailed) -> list[Command]:
        serial = event.trajectory.group
        group = self.groups.pop(serial, None)
        if group is None:
            return []
        for member, name in group.routed.items():
            self.instances[name].assigned.discard(TrajectoryId(serial, member))
        self._unrouted = deque(t for t in self._unrouted if t.group != serial)
        self.buffers.release(serial)
        self._num_dropped += 1
        return [Drop(serial, f"reward failed: {event.error}")]

    def _on_published(self, event: VersionPublished) -> None:
        if self.training is None or event.version != self.training + 1:
            return
        self.published = event.version
        self.training = None

    def _on_evaluated(self, event: Evaluated) -> None:
        instance = self.instances[event.instance]
        if instance.evaluating == event.version:
            instance.evaluating = None

    # -- intents -----------------------------------------------------------------------------

    def _plan(self) -> Iterator[Command]:
        if self.published is None or self.finished:
            return
        yield from self._plan_training()
        yield from self._plan_pulls(self.published)
        yield from self._plan_evaluations()
        yield from self._plan_routes()
        yield from self._plan_draws()
        yield from self._plan_end(self.published)

    def _plan_training(self) -> Iterator[Command]:
        if self.training is None and self.buffers.ready():
            self.training = self.buffers.first
            assert self.training == self.published
            groups = self.buffers.consume()
            for group in groups:
                del self.groups[group]
            yield Train(self.training, groups)

    def _plan_pulls(self, published: Version) -> Iterator[Command]:
        for instance in self.instances.values():
            if instance.version < published and instance.evaluating is None:
                instance.version = published
                yield Pull(instance.name, instance.next_number(), published)

    def _plan_evaluations(self) -> Iterator[Command]:
        for instance in self.instances.values():
            if instance.evaluating is None and instance.version in self._evaluations:
                self._evaluations.remove(instance.version)
                instance.evaluating = instance.version
                yield Evaluate(instance.name, instance.next_number(), instance.version)

    def _plan_routes(self) -> Iterator[Command]:
        while self._unrouted or self._drawn:
            if not self._unrouted and not self._admit():
                return
            trajectory = self._unrouted[0]
            instance = self._instance_for(trajectory)
            if instance is None:
                return
            self._unrouted.popleft()
            instance.assigned.add(trajectory)
            self.groups[trajectory.group].routed[trajectory.member] = instance.name
            yield Route(instance.name, instance.next_number(), trajectory)

    def _admit(self) -> bool:
        """Reserve an entry for the next group, at the version of the instance it would go to."""
        for instance in self._by_load():
            serial = self._drawn[0]
            if self.buffers.reserve(serial, instance.version) is not None:
                self._drawn.popleft()
                self.groups[serial] = Group()
                self._unrouted.extend(
                    TrajectoryId(serial, member) for member in range(self.plan.num_generations)
                )
                return True
        return False

    def _instance_for(self, trajectory: TrajectoryId) -> Instance | None:
        for instance in self._by_load():
            if self.buffers.tighten(trajectory.group, instance.version):
                return instance
        return None

    def _by_load(self) -> list[Instance]:
        """Instances with room, fewest requests first; ties in the order they joined."""
        return sorted(
            (i for i in self.instances.values() if i.has_room), key=lambda i: len(i.assigned)
        )

    def _plan_draws(self) -> Iterator[Command]:
        # One batch ahead, so that admission never waits for the data, but none too many: every
        # batch takes its groups, and each that was dropped is replaced.
        wanted = self.plan.num_batches * self.plan.groups_per_batch + self._num_dropped
        left = wanted - self._next_group - self._asked_for
        ahead = self.plan.groups_per_batch - len(self._drawn) - self._asked_for
        count = min(left, ahead)
        if count > 0:
            self._asked_for += count
            yield Draw(count)

    def _plan_end(self, published: Version) -> Iterator[Command]:
        # The last evaluation was commanded with the last pull, or waits for an earlier one to end.
        busy = any(i.evaluating is not None for i in self.instances.values())
        if published == self.plan.num_batches and not busy:
            self.finished = True
            yield Finish()
