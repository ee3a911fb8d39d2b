"""Routing: which of what waits goes to which instance.

An assignment names an instance that accepts and has room, counting what this very answer has given
it already. Among equals the first that joined is taken, so one view has one answer.

**A block ends the tick.** `waterfall` stops at the first trajectory that has no place, so nothing
behind it can take what it waits for: old work is never overtaken by newer, nor a long response by
shorter ones of its level. (StaleFlow blocks the levels below only; then one that needs much room
could be passed again and again.) It also makes a tick in which nothing fits cost one look at the
fleet. `fewest_requests` passes over whatever has no place.

**Tokens are weighed by powers of two.** Instances are compared at the largest power of two not
above a trajectory's tokens, so a heap for each size that occurs finds the best in O(log instances);
whether its gain is enough is then judged by the exact number.

**Room to grow.** `waterfall` leaves a share of each cache free (`kv_headroom`), for what runs there
grows. Without it a full fleet spends its time on preempting, sending back and routing again: 2.0
million interruptions of 10 thousand responses in one simulated run (docs/lab-log.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush

from rhymeflow.core.strategies.base import Assignment, FleetView, TrajectoryView, most_assignments
from rhymeflow.core.strategies.gains import Class, Gains, Load
from rhymeflow.core.types import InstanceId, Version


def fewest_requests(view: FleetView) -> list[Assignment]:
    """Each, in order of the queue, to the instance that has the fewest.

    Room is an instance's `capacity`, and a KV cache that is not full yet: what a trajectory needs
    of it is not asked. One with turns goes where its cache may still be, if there is room. O(log
    instances) for each trajectory while any instance has room.
    """
    fleet = _Fewest(view)
    proposals: list[Assignment] = []
    most = most_assignments(len(view.instances))
    if not fleet.heaps:
        return proposals
    for trajectory in view.queue:
        place = fleet.choose(trajectory)
        if place is None:
            continue
        proposals.append(Assignment(trajectory.id, view.instances[place].name))
        fleet.give(place, trajectory.tokens)
        if not fleet.heaps or len(proposals) == most:
            break
    return proposals


class _Fewest:
    """Instances with room, by version those with the fewest trajectories first."""

    def __init__(self, view: FleetView) -> None:
        self._instances = view.instances
        self._loads: dict[int, tuple[int, int]] = {}
        """Of each place with room: trajectories, and KV tokens."""
        self._places: dict[InstanceId, int] = {}
        self.heaps: dict[Version, list[tuple[int, int]]] = {}
        """Entries with another count than the place has now are out of date."""
        for place, instance in enumerate(view.instances):
            if instance.has_room():
                self._loads[place] = len(instance.assigned), instance.kv_tokens
                self._places[instance.name] = place
                self.heaps.setdefault(instance.version, []).append((len(instance.assigned), place))
        for heap in self.heaps.values():
            heapify(heap)

    def choose(self, trajectory: TrajectoryView) -> int | None:
        """Where it can go, if anywhere."""
        home = self._places.get(trajectory.home) if trajectory.home is not None else None
        if home in self._loads and self._instances[home].version >= trajectory.min_version:
            return home
        able = [heap for version, heap in self.heaps.items() if version >= trajectory.min_version]
        return min(able)[0][1] if able else None

    def give(self, place: int, tokens: int) -> None:
        """A trajectory of so many tokens goes there."""
        instance = self._instances[place]
        count, kv_tokens = self._loads[place]
        count, kv_tokens = count + 1, kv_tokens + tokens
        heap = self.heaps[instance.version]
        if count < instance.capacity and kv_tokens < instance.kv_capacity:
            self._loads[place] = count, kv_tokens
            heappush(heap, (count, place))
        else:
            del self._loads[place]
        while heap and self._loads.get(heap[0][1], (-1, 0))[0] != heap[0][0]:
            heappop(heap)
        if not heap:
            del self.heaps[instance.version]


def waterfall(view: FleetView) -> list[Assignment]:
    """Each to the instance that gains most by it (StaleFlow, routing strategy).

    A new trajectory tries the instances of the highest version first, so that it starts as fresh as
    may be; a partial one those of the lowest that may have it, which leaves the fresh ones to the
    new. Of these the one with the largest gain in throughput is taken if it loses none or is empty,
    else the next version is tried. (StaleFlow's mu is 0: its authors take 0.2 to 0.3, and in our
    measurements 0 trains more, docs/lab/scheduling.md.)
    Instances on which anything waits are left out. One with turns goes where its cache may still
    be, if that instance has room and loses none: it need not be prefilled there. O(log instances)
    for each assignment and for each instance that has changed since the last tick (`gains.py`).
    """
    gains = _gains(view)
    classes = gains.show(view)
    ascending = sorted(classes)
    descending = ascending[::-1]
    proposals: list[Assignment] = []
    most = most_assignments(len(view.instances))
    if not classes:
        return proposals
    for trajectory in view.queue:
        if trajectory.version is None and view.num_returning:
            break
        load = gains.home(trajectory) or _candidate(
            trajectory, classes, descending if trajectory.version is None else ascending
        )
        if load is None:
            break
        proposals.append(Assignment(trajectory.id, load.instance.name))
        gains.give(load, trajectory.tokens)
        if len(proposals) == most:
            break
    return proposals


def _candidate(
    trajectory: TrajectoryView, classes: Mapping[Version, Class], versions: Iterable[Version]
) -> Load | None:
    """The instance that gains most, in the first of these classes where one gains."""
    for version in versions:
        if version >= trajectory.min_version:
            load = classes[version].accepting(trajectory)
            if load is not None:
                return load
    return None


def _gains(view: FleetView) -> Gains:
    """What is kept of the tick before, if it is of this schedule."""
    kept = view.memo.get(__name__)
    if not isinstance(kept, Gains) or kept.settings is not view.settings:
        kept = view.memo[__name__] = Gains(view.settings)
    return kept
