"""HistoPipe's memory: which step a group belongs to, and which instances generate it.

A step has as many groups as a batch. It is laid out once all groups of the step before are admitted
and some instance has finished its share of that step. An instance begins its share when nothing of
an earlier step runs there. A migrated trajectory (an outlier) gets its own place: another instance
in its step, or the same instance in the next step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rhymeflow.core.histopipe.layout import Ranked, Share, lay_out
from rhymeflow.core.types import GroupId, InstanceId, TrajectoryId

if TYPE_CHECKING:
    from rhymeflow.core.state import State


class Place(NamedTuple):
    """When and where a trajectory is to be generated."""

    step: int
    instance: InstanceId


class Pipeline:
    """The layout of all groups that have not ended."""

    def __init__(self) -> None:
        self.num_steps = 0  # steps laid out
        self._groups: dict[GroupId, tuple[int, tuple[InstanceId, ...]]] = {}
        """Each group's step, and the instances that its members are dealt out to."""
        self._moved: dict[GroupId, dict[TrajectoryId, Place]] = {}
        self._shares: dict[InstanceId, float] = {}

    # -- queries -----------------------------------------------------------------------------

    def __contains__(self, group: GroupId) -> bool:
        return group in self._groups

    def place(self, trajectory: TrajectoryId) -> Place | None:
        """Return where a trajectory is to be generated; None: its group is not laid out yet."""
        if trajectory.group not in self._groups:
            return None
        if self.has_moved(trajectory):
            return self._moved[trajectory.group][trajectory]
        step, names = self._groups[trajectory.group]
        # Groups start at different instances, so that each instance gets its share of all members.
        return Place(step, names[(trajectory.group + trajectory.member) % len(names)])

    def step(self, assigned: Iterable[TrajectoryId]) -> int | None:
        """Return the earliest step of these trajectories; None: none is laid out."""
        places = (self.place(trajectory) for trajectory in assigned)
        return min((place.step for place in places if place is not None), default=None)

    def has_moved(self, trajectory: TrajectoryId) -> bool:
        """Whether the trajectory was moved from its place in the layout."""
        return trajectory in self._moved.get(trajectory.group, ())

    def share(self, instance: InstanceId) -> float:
        """Return how many groups' worth of responses the instance has in the last step."""
        return self._shares.get(instance, 0.0)

    # -- changes (see `strategies.base.Layout`) ----------------------------------------------

    def extend(self, state: State) -> None:
        """Lay out the next step once an instance has finished its share of the last one."""
        if not state.instances:
            return
        self.replace_lost(state.instances.keys())
        new = [group for group in state.queue.unadmitted if group not in self]
        for group in [g for g in new if state.prompts[g].retries]:
            self.join(group, state.instances)  # it replaces a group of the last step
            new.remove(group)
        if new and len(new) == len(state.queue.unadmitted) and self._is_one_done(state):
            shares = lay_out(
                _ranked(state, new[: state.plan.groups_per_batch + state.plan.extra_groups]),
                len(state.instances),
                state.schedule.settings.cost,
                min(instance.capacity for instance in state.instances.values()),
            )
            self.add_step(shares, list(state.instances))

    def _is_one_done(self, state: State) -> bool:
        """Whether some instance has no trajectory of the last step or an earlier one."""
        steps = (self.step([*i.assigned, *i.stopping]) for i in state.instances.values())
        return any(step is None or step >= self.num_steps for step in steps)

    def add_step(self, shares: Sequence[Share], instances: Sequence[InstanceId]) -> None:
        """Add a step whose shares go from short to long, or, every other time, long to short."""
        order = instances[::-1] if self.num_steps % 2 else instances
        start = 0
        for groups, number in shares:
            names = tuple(order[start : start + number])
            start += number
            for group in groups:
                self._groups[group] = self.num_steps, names
            for name in names:
                self._shares[name] = len(groups) / number
        self.num_steps += 1

    def join(self, group: GroupId, instances: Collection[InstanceId]) -> None:
        """Lay out a single group with the last step, on all instances."""
        self._groups[group] = max(0, self.num_steps - 1), tuple(sorted(instances))

    def replace_lost(self, instances: Collection[InstanceId]) -> None:
        """Move places on other instances than these, which are gone, to these."""
        for name in self._shares.keys() - instances:
            del self._shares[name]
        all_names = tuple(sorted(instances))
        for group, (step, names) in self._groups.items():
            if not all(name in instances for name in names):
                remaining = tuple(name for name in names if name in instances)
                self._groups[group] = step, remaining or all_names
        for moved in self._moved.values():
            for trajectory, place in moved.items():
                if place.instance not in instances:
                    moved[trajectory] = Place(place.step, all_names[0])

    def move(self, trajectories: Iterable[TrajectoryId], to: InstanceId, *, later: bool) -> None:
        """Move the trajectories' places to this instance, in their step or the next."""
        for trajectory in trajectories:
            place = self.place(trajectory)
            assert place is not None, f"{trajectory} is not laid out"
            self._moved.setdefault(trajectory.group, {})[trajectory] = Place(place.step + later, to)

    def end(self, group: GroupId) -> None:
        """Forget a group that has ended."""
        self._groups.pop(group, None)
        self._moved.pop(group, None)


def _ranked(state: State, groups: Sequence[GroupId]) -> list[Ranked]:
    """Return the groups with the expected length of each of their responses."""
    lengths, count = state.lengths, state.plan.num_generations
    points = [(i + 0.5) / count for i in range(count)]
    return [
        Ranked(g, state.prompts[g].tokens, tuple(sorted(lengths.quantile(g, q) for q in points)))
        for g in groups
    ]
