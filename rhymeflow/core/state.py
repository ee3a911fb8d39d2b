"""Everything the coordinator remembers, and the operations that change it.

Between any two calls the protocol's buffers, groups, queue and instances agree
(`tests/core/invariants.py`); a group that ends is removed from all of them at once. Handlers and
the planner change them through the methods here and those of the parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from rhymeflow.core import commands
from rhymeflow.core.commands import Command
from rhymeflow.core.events import GroupCreated
from rhymeflow.core.instance import Instance
from rhymeflow.core.lengths import LengthPredictor
from rhymeflow.core.plan import Plan, Schedule
from rhymeflow.core.protocol.group import Group, Member, MemberState
from rhymeflow.core.protocol.ordered import OrderedBuffers
from rhymeflow.core.protocol.staleness import StalenessBuffers
from rhymeflow.core.types import Ending, EvaluationId, GroupId, InstanceId, TrajectoryId, Version


class RequestedPrompt(NamedTuple):
    """The prompt of a group."""

    tokens: int
    retries: int  # number of earlier groups of this prompt that were retried


class Queue:
    """Trajectories that wait to be routed: partial ones by V_traj, oldest first, and agents' first
    calls last; then new members of admitted groups; then groups that are not admitted."""

    def __init__(self) -> None:
        self.unadmitted: deque[GroupId] = deque()  # groups that are not admitted yet
        self.new: dict[TrajectoryId, None] = {}  # new members of admitted groups, in order
        self._begun: dict[tuple[Version, bool], dict[TrajectoryId, None]] = {}  # with who is last

    def __bool__(self) -> bool:
        return bool(self.new or self._begun or self.unadmitted)

    def put(self, trajectory: TrajectoryId, version: Version | None, *, last: bool = False) -> None:
        """Add a trajectory started under `version`; None: a new one."""
        level = self.new if version is None else self._begun.setdefault((version, last), {})
        level[trajectory] = None

    def take(self, trajectory: TrajectoryId, version: Version | None) -> None:
        """Remove a trajectory that was added with this version."""
        if version is None:
            del self.new[trajectory]
            return
        key = version, trajectory in self._begun.get((version, True), ())
        del self._begun[key][trajectory]
        if not self._begun[key]:
            del self._begun[key]

    def partial(self) -> Iterator[tuple[Version, TrajectoryId]]:
        """Yield the trajectories that have started, with their V_traj, in order."""
        for version, last in sorted(self._begun):
            yield from ((version, each) for each in self._begun[version, last])

    def lowest_version(self) -> Version | None:
        """Return the least V_traj of the trajectories that have started; None: there are none."""
        return min(self._begun, default=(None,))[0]


class State:
    """The coordinator's memory."""

    has_more = False
    """Whether the last tick stopped before everything was planned: the next follows at once."""

    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        self.plan, self.schedule = plan, schedule
        kind = OrderedBuffers if plan.batch_order == "requested" else StalenessBuffers
        self.buffers = kind(
            groups_per_batch=plan.groups_per_batch,
            extra_groups=plan.extra_groups,
            max_staleness=plan.max_staleness,
            num_batches=plan.num_batches,
        )
        self.lengths = LengthPredictor(plan.max_length, self.generated)
        self.layout = schedule.layout()
        self.instances: dict[InstanceId, Instance] = {}
        self.names: set[InstanceId] = set()  # of all instances that ever joined or left
        self.groups: dict[GroupId, Group] = {}  # admitted groups that have not ended
        self.queue = Queue()
        self.pulling: tuple[InstanceId, ...] = ()  # instances that the next ticks have pull
        self.published: Version | None = None
        self.training: Version | None = None
        self.accumulated: list[tuple[GroupId, ...]] = []  # the groups of each `Accumulate`
        self.learner_is_busy = False  # with the last of these, or with training and publishing
        self.finished = False
        self.evaluations = plan.evaluations(range(plan.num_batches + 1))  # still to be commanded
        self.next_group: GroupId = 0
        self.early: dict[GroupId, GroupCreated] = {}  # kept until all lower numbers are reported
        self.num_requested = 0  # groups that are requested and not reported yet
        self.prompts: dict[GroupId, RequestedPrompt] = {}  # of groups reported and not ended
        self.retries: dict[GroupId, int] = {}  # by ended group: its prompt's, the next included
        self.num_inflight = 0  # admitted groups that are not complete
        self.num_waiting_env = 0  # members that wait for their environments
        self.num_filtered = 0  # groups filtered since the last version
        self.round_left = 0  # lockstep: groups of this round that are still to be admitted
        self.round_version: Version = 0  # lockstep: the version published when this round began

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the plan and the schedule; `restore` sets them again."""
        return {k: v for k, v in vars(self).items() if k not in ("plan", "schedule")}

    def restore(self, plan: Plan, schedule: Schedule) -> None:
        """Complete a state that was read from a snapshot."""
        self.plan, self.schedule, self.lengths.generated = plan, schedule, self.generated

    def reconfigure(self, plan: Plan, schedule: Schedule) -> None:
        """Continue with more or fewer batches, other evaluations and other rules."""
        now = self.published or 0
        assert plan.groups_per_batch == self.plan.groups_per_batch
        assert plan.max_staleness == self.plan.max_staleness
        assert plan.num_batches >= self.buffers.first
        turned_off = {suite for suite, every in self.plan.eval_steps.items() if every}
        turned_off -= {suite for suite, every in plan.eval_steps.items() if every}
        self.plan, self.schedule, self.finished = plan, schedule, False
        self.buffers.num_batches = plan.num_batches
        for instance in self.instances.values():
            instance.shown = None  # other rules may change whether it accepts trajectories
        # Evaluations of older versions that are still due are done on the newest version, unless
        # the new configuration turns that suite's evaluations off.
        missed = {
            EvaluationId(now, suite)
            for version, suite in self.evaluations
            if version <= now and suite in plan.eval_steps and suite not in turned_off
        }
        self.evaluations = missed | plan.evaluations(range(now + 1, plan.num_batches + 1))

    # -- queries -----------------------------------------------------------------------------

    def member(self, trajectory: TrajectoryId) -> Member | None:
        """Return the trajectory's record; None: its group has ended or is not admitted."""
        group = self.groups.get(trajectory.group)
        if group is None or not 0 <= trajectory.member < len(group.members):
            return None
        return group.members[trajectory.member]

    def generated(self, trajectory: TrajectoryId) -> int:
        """Estimate how many tokens the policy has generated for a trajectory."""
        member = self.member(trajectory)
        if member is None:
            return 0
        if member.state is MemberState.RUNNING and member.instance is not None:
            return member.sampled + self.instances[member.instance].generated(trajectory)
        return member.sampled

    def home(self, member: Member) -> InstanceId | None:
        """Return the instance whose cache may still have the member; see `TrajectoryView.home`."""
        if member.home is None:
            return None
        name, version = member.home
        instance = self.instances.get(name)
        return name if instance is not None and instance.version == version else None

    def room(self) -> int:
        """Return how many groups may be admitted now, by the schedule and the EMPTY entries."""
        size = self.plan.num_generations + self.plan.extra_generations
        # Members that wait for environments are on no instance: they do not count as in flight.
        num_waiting = self.num_waiting_env // size
        room = self.schedule.max_inflight_groups - self.num_inflight + num_waiting
        if self.schedule.admission == "lockstep":
            room = min(room, self.round_left)
        return min(room, self.buffers.num_empty())

    def admits(self, version: Version) -> bool:
        """Whether a new group may start at `version` now."""
        if self.schedule.admission == "lockstep" and version < self.round_version:
            return False
        return self.room() > 0 and self.buffers.admissible(version)

    def min_version(self, group_id: GroupId) -> Version:
        """Return the lowest version at which a new member of an admitted group may start."""
        place = self.buffers.place(group_id)
        assert place is not None
        return max(0, place - self.plan.max_staleness)

    def accepts(self, instance: Instance) -> bool:
        """Whether trajectories may be routed to the instance; see `OnPull`."""
        assert self.published is not None
        return self.all_accept or instance.version >= self.published

    @property
    def all_accept(self) -> bool:
        """Whether every instance accepts: in lockstep one that lags may get the current batch."""
        return self.schedule.on_pull != "drain" or self.schedule.admission == "lockstep"

    # -- trajectories ------------------------------------------------------------------------

    def start(self, trajectory: TrajectoryId, instance: Instance) -> Iterator[Command]:
        """Route a waiting trajectory to an instance, if the protocol allows it."""
        group_id = trajectory.group
        if group_id not in self.groups and not (
            group_id in self.prompts and self._admit(group_id, instance.version)
        ):
            return
        group = self.groups[group_id]
        member = group.members[trajectory.member]
        if member.state is not MemberState.WAITING:
            return
        if member.version is None:
            if not self.buffers.tighten(group_id, instance.version):
                return
        elif instance.version < member.version:
            return
        self.queue.take(trajectory, member.version)
        member.apply(commands.Route)
        member.instance = instance.name
        if member.version is None:
            member.version = instance.version
        tokens = group.prompt_tokens + member.length
        instance.assign(trajectory, tokens)
        yield commands.Route(
            instance.name, instance.next_number(tokens), trajectory, instance.version
        )

    def _admit(self, group_id: GroupId, version: Version) -> bool:
        """Reserve an entry for an unadmitted group; False: it cannot have one now."""
        if not self.admits(version) or self.buffers.reserve(group_id, version) is None:
            return False
        self.queue.unadmitted.remove(group_id)  # fast: it is near the front
        count = self.plan.num_generations + self.plan.extra_generations
        group = Group(group_id, *self.prompts[group_id], [Member() for _ in range(count)])
        self.groups[group_id] = group
        self.num_inflight += 1
        self.round_left = max(0, self.round_left - 1)
        for trajectory in group.ids():
            self.queue.put(trajectory, None)
        return True

    def interrupt(
        self, instance: Instance, trajectories: tuple[TrajectoryId, ...]
    ) -> Iterator[Command]:
        """Interrupt trajectories that run on the instance."""
        number = instance.take(trajectories)
        for trajectory in trajectories:
            member = self.groups[trajectory.group].members[trajectory.member]
            member.apply(commands.Interrupt)
            member.stop = number
        instance.stopping.update(trajectories)
        yield commands.Interrupt(instance.name, number, trajectories)

    def put_back(self, trajectory: TrajectoryId, cause: type) -> bool:
        """Queue a trajectory that has left its instance; False: its state does not allow it."""
        member = self.groups[trajectory.group].members[trajectory.member]
        if not member.apply(cause):
            return False
        self.queue.put(trajectory, member.version, last=member.is_before_first_call)
        return True

    def finish_early(self, trajectory: TrajectoryId) -> Iterator[Command]:
        """Truncate a waiting trajectory: what it has is its response."""
        member = self.groups[trajectory.group].members[trajectory.member]
        if member.state is MemberState.WAITING:
            self.queue.take(trajectory, member.version)
        self.num_waiting_env -= member.state is MemberState.WAITING_ENV
        member.apply(commands.FinishEarly)
        yield commands.FinishEarly(trajectory)

    def abort_members(self, group: Group) -> Iterator[Command]:
        """Abort the members that are not rewarded."""
        on_instance: dict[InstanceId, list[TrajectoryId]] = {}
        in_environment: list[TrajectoryId] = []
        for trajectory, member in zip(group.ids(), group.members, strict=True):
            if member.state is MemberState.WAITING:
                self.queue.take(trajectory, member.version)
            if member.turn and member.state in (MemberState.WAITING, MemberState.WAITING_ENV):
                in_environment.append(trajectory)
            self.num_waiting_env -= member.state is MemberState.WAITING_ENV
            if member.instance is not None:
                on_instance.setdefault(member.instance, []).append(trajectory)
            member.apply(commands.Abort)
        for name, trajectories in on_instance.items():
            instance = self.instances[name]
            running = tuple(t for t in trajectories if t in instance.assigned)
            instance.stopping.difference_update(trajectories)
            yield commands.Abort(name, instance.take(running), tuple(trajectories))
        if in_environment:
            yield commands.CloseEnvironments(tuple(in_environment))

    # -- ends of groups ----------------------------------------------------------------------

    def forget(self, group_id: GroupId) -> Group:
        """Remove a group that no longer holds an entry from everything else."""
        self.lengths.close(group_id)
        self.layout.end(group_id)
        del self.prompts[group_id]
        return self.groups.pop(group_id)

    def release(self, group_id: GroupId, ending: Ending, reason: str) -> Iterator[Command]:
        """End a group that holds an entry without training on it; its entry becomes EMPTY."""
        surplus = self.buffers.release(group_id)
        yield from self._drop(group_id, ending, reason)
        yield from self.drop_surplus(surplus)

    def drop_surplus(self, surplus: tuple[GroupId, ...]) -> Iterator[Command]:
        """Abort groups whose batch was completed by others."""
        for group_id in surplus:
            yield from self._drop(group_id, "aborted", "surplus: its batch is complete")

    def retry(self, group: Group, reason: str) -> Iterator[Command]:
        """End a group and retry its prompt."""
        self.retries[group.id] = group.retries + 1
        self.num_requested += 1
        yield from self.release(group.id, "aborted", f"{reason}; its prompt is retried")
        yield commands.RetryPrompt(group.id)

    def _drop(self, group_id: GroupId, ending: Ending, reason: str) -> Iterator[Command]:
        group = self.forget(group_id)
        if not group.complete:
            self.num_inflight -= 1
        yield from self.abort_members(group)
        yield commands.Drop(group_id, ending, reason)
