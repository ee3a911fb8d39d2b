"""Everything the mind remembers, and the few ways in which it changes.

Holds true: books of the protocol, groups, queue and instances tell the same story between any two
calls (`invariants.check`); a group that ends is taken out of all of them at once, and ends once.
Facts (`facts.py`) and planning (`planner.py`) both change it only through the methods here. Knows
no strategies and no time.
"""

from __future__ import annotations

from collections.abc import Iterator

from rhymeflow.core.commands import Abort, Command, Drop
from rhymeflow.core.fleet import Instance
from rhymeflow.core.group import ON_INSTANCE, Group, Member, State
from rhymeflow.core.history import LengthHistory
from rhymeflow.core.pipeline import Pipeline
from rhymeflow.core.plan import Plan, Schedule
from rhymeflow.core.queue import Queue
from rhymeflow.core.staleness import StalenessBuffers
from rhymeflow.core.types import Ending, GroupId, InstanceId, TrajectoryId, Version


class Books:
    """The mind's memory."""

    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        self.plan, self.schedule = plan, schedule
        self.buffers = StalenessBuffers(
            groups_per_batch=plan.groups_per_batch,
            extra_groups=plan.extra_groups,
            max_staleness=plan.max_staleness,
            num_batches=plan.num_batches,
        )
        self.history = LengthHistory(plan.max_length)
        self.pipeline = Pipeline()
        self.instances: dict[InstanceId, Instance] = {}
        self.names: set[InstanceId] = set()
        """Every instance that ever joined."""
        self.groups: dict[GroupId, Group] = {}
        """Admitted groups that have not ended."""
        self.queue = Queue()
        self.published: Version | None = None
        self.training: Version | None = None
        self.finished = False
        self.evaluations: set[Version] = {
            v for v in range(plan.num_batches + 1) if plan.evaluates(v)
        }
        """Versions still to be evaluated."""
        self.next_group: GroupId = 0
        """The serial number of the next group that the data will give."""
        self.asked_for = 0
        """Groups commanded from the data but not reported yet."""
        self.prompts: dict[GroupId, tuple[int, int]] = {}
        """Of groups drawn and not ended: prompt tokens, and retries before it."""
        self.retries: dict[GroupId, int] = {}
        """Of groups whose prompt is being drawn again: retries, this one included."""
        self.num_incomplete = 0
        """Admitted groups that still produce."""
        self.num_filtered = 0
        """Groups filtered since the last version."""
        self.round_left = 0
        """Lockstep: groups of this round that are still to be admitted."""
        self.round_version: Version = 0
        """Lockstep: the version published when this round began."""

    # -- questions ---------------------------------------------------------------------------

    def member(self, trajectory: TrajectoryId) -> Member | None:
        """The trajectory's record; None if its group has ended or never was."""
        group = self.groups.get(trajectory.group)
        return None if group is None else group.members[trajectory.member]

    def admits(self, version: Version) -> bool:
        """Whether a new group may start at `version` now."""
        if self.schedule.admission == "lockstep" and (
            self.round_left == 0 or version < self.round_version
        ):
            return False
        if self.num_incomplete >= self.schedule.max_under_way:
            return False
        return self.buffers.admissible(version)

    # -- changes -----------------------------------------------------------------------------

    def admit(self, serial: GroupId, version: Version) -> bool:
        """Reserve an entry for the group next in the queue; False: there is none for it."""
        if not self.admits(version) or self.buffers.reserve(serial, version) is None:
            return False
        self.queue.drawn.remove(serial)  # it is at the front, or near it
        tokens, retries = self.prompts[serial]
        count = self.plan.num_generations + self.plan.extra_generations
        group = Group(serial, tokens, retries, [Member() for _ in range(count)])
        self.groups[serial] = group
        self.num_incomplete += 1
        self.round_left = max(0, self.round_left - 1)
        for trajectory in group.ids():
            self.queue.put(trajectory, None)
        return True

    def start(self, trajectory: TrajectoryId, instance: Instance) -> bool:
        """Give a waiting trajectory to an instance; False: the protocol does not allow it."""
        serial = trajectory.group
        if serial not in self.groups and not (
            serial in self.prompts and self.admit(serial, instance.version)
        ):
            return False
        group = self.groups[serial]
        member = group.members[trajectory.member]
        if member.state is not State.WAITING:
            return False
        if member.version is None:
            if not self.buffers.tighten(serial, instance.version):
                return False
        elif instance.version < member.version:
            return False
        self.queue.take(trajectory, member.version)
        if member.version is None:
            member.version = instance.version
        member.state, member.instance = State.RUNNING, instance.name
        instance.assigned[trajectory] = group.prompt_tokens + member.length
        instance.routed_at[trajectory] = instance.clock
        return True

    def put_back(self, trajectory: TrajectoryId, member: Member) -> None:
        """Let a trajectory that no instance has any more wait to be routed."""
        member.state, member.instance = State.WAITING, None
        self.queue.put(trajectory, member.version)

    def abort_members(self, group: Group) -> Iterator[Command]:
        """Abort those of the group that are not judged."""
        told: dict[InstanceId, list[TrajectoryId]] = {}
        for trajectory, member in zip(group.ids(), group.members, strict=True):
            if member.state is State.REWARDED:
                continue
            if member.state is State.WAITING:
                self.queue.take(trajectory, member.version)
            elif member.state in ON_INSTANCE:
                assert member.instance is not None
                told.setdefault(member.instance, []).append(trajectory)
            member.state, member.instance = State.ABORTED, None
        for name, trajectories in told.items():
            instance = self.instances[name]
            running = tuple(t for t in trajectories if t in instance.assigned)
            instance.stopping.difference_update(trajectories)
            yield Abort(name, instance.take(running), tuple(trajectories))

    def end_group(self, serial: GroupId, ending: Ending, reason: str) -> Iterator[Command]:
        """End a group that holds no entry any more, without training on it."""
        group = self.groups.pop(serial)
        self.history.close(serial)
        self.pipeline.end(serial, len(group.members))
        del self.prompts[serial]
        if not group.complete:
            self.num_incomplete -= 1
        yield from self.abort_members(group)
        yield Drop(serial, ending, reason)

    def release(self, serial: GroupId, ending: Ending, reason: str) -> Iterator[Command]:
        """End a group that holds an entry; its place is free for another."""
        surplus = self.buffers.release(serial)
        yield from self.end_group(serial, ending, reason)
        yield from self.end_surplus(surplus)

    def end_surplus(self, surplus: tuple[GroupId, ...]) -> Iterator[Command]:
        """End groups whose batch was completed by others."""
        for serial in surplus:
            yield from self.end_group(serial, "aborted", "surplus: its batch is complete")
