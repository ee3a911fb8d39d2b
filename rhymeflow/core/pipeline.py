"""HistoPipe's memory: which step a group belongs to, and the instances that it is laid out on.

A step is as many groups as a batch has. It is laid out when an instance has nothing left of the
step before and all of that is under way, with what is known of lengths by then. An instance begins
its share when nothing of an earlier step runs there. What is taken away from an instance (an
outlier) gets a place of its own: another instance in its step, or the same one in the next.

Holds true: every group is laid out once; a place names an instance that was there at the time. Who
gets how many instances is decided in `strategies/layout.py`; what may start, by the protocol.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from rhymeflow.core.strategies.layout import Share
from rhymeflow.core.types import GroupId, InstanceId, TrajectoryId


class Place(NamedTuple):
    """When and where something is to be produced."""

    step: int
    instance: InstanceId


class Pipeline:
    """The layouts made so far, as far as their groups have not ended."""

    def __init__(self) -> None:
        self.num_steps = 0
        """Steps laid out."""
        self._groups: dict[GroupId, tuple[int, tuple[InstanceId, ...]]] = {}
        """The step of each, and whom its members are dealt out to."""
        self._moved: dict[TrajectoryId, Place] = {}
        self._shares: dict[InstanceId, float] = {}

    # -- questions ---------------------------------------------------------------------------

    def __contains__(self, group: GroupId) -> bool:
        return group in self._groups

    def place(self, trajectory: TrajectoryId) -> Place | None:
        """Where a trajectory is to be produced; None: its group is not laid out yet."""
        if trajectory in self._moved:
            return self._moved[trajectory]
        if trajectory.group not in self._groups:
            return None
        step, names = self._groups[trajectory.group]
        # Groups begin with different instances, so that first members are dealt out too.
        return Place(step, names[(trajectory.group + trajectory.member) % len(names)])

    def step(self, assigned: Iterable[TrajectoryId]) -> int | None:
        """The earliest step that any of these belongs to; None: there are none."""
        places = (self.place(trajectory) for trajectory in assigned)
        return min((place.step for place in places if place is not None), default=None)

    def has_moved(self, trajectory: TrajectoryId) -> bool:
        """Whether it was taken away from where it was laid out."""
        return trajectory in self._moved

    def share(self, instance: InstanceId) -> float:
        """Groups' worth of responses that the last layout gave it."""
        return self._shares.get(instance, 0.0)

    # -- changes -----------------------------------------------------------------------------

    def lay_out(
        self, shares: Sequence[Share], instances: Sequence[InstanceId], *, alternate: bool
    ) -> None:
        """One more step: shares from short to long, or, every other time, from long to short."""
        order = instances[::-1] if alternate and self.num_steps % 2 else instances
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

    def move(self, trajectory: TrajectoryId, to: InstanceId, *, later: bool) -> None:
        """Produce it there, in its step or in the next."""
        place = self.place(trajectory)
        assert place is not None, f"{trajectory} is not laid out"
        self._moved[trajectory] = Place(place.step + later, to)

    def settle(self, instances: Collection[InstanceId]) -> None:
        """What is laid out on instances that are gone goes to the others."""
        for name in self._shares.keys() - instances:
            del self._shares[name]
        everyone = tuple(sorted(instances))
        for group, (step, names) in self._groups.items():
            if not all(name in instances for name in names):
                left = tuple(name for name in names if name in instances)
                self._groups[group] = step, left or everyone
        for trajectory, place in self._moved.items():
            if place.instance not in instances:
                self._moved[trajectory] = Place(place.step, everyone[0])

    def end(self, group: GroupId, members: int) -> None:
        """The group has ended."""
        self._groups.pop(group, None)
        for member in range(members):
            self._moved.pop(TrajectoryId(group, member), None)
