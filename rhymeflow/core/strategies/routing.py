"""Routing: which of what waits goes to which instance.

An assignment names an instance that accepts and has room, counting what this very answer has given
it already. Among equals the first that joined is taken, so one view has one answer.

**A block ends the tick.** `waterfall` stops at the first trajectory that has no place, so nothing
behind it can take what it waits for: old work is never overtaken by newer, nor a long response by
shorter ones of its level. (StaleFlow blocks the levels below only; then one that needs much room
could be passed again and again.) It also makes a tick in which nothing fits cost one look at the
fleet. `fewest_requests` passes over whatever has no place.

**Tokens are weighed by powers of two.** Instances are compared at the largest power of two not
above a trajectory's tokens: a tick makes a heap for each such size that occurs, which finds the
best in O(log instances). Whether its gain is enough is then judged by the exact number.

**Room to grow.** `waterfall` leaves a share of each cache free (`KV_HEADROOM`), for what runs there
grows. Without it a full fleet spends its time on preempting, sending back and routing again: 2.0
million interruptions of 10 thousand responses in one simulated run (docs/lab-log.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from rhymeflow.core.strategies.base import (
    Assignment,
    FleetView,
    InstanceView,
    TrajectoryView,
    fits,
    most_assignments,
    weighed,
)
from rhymeflow.core.types import InstanceId, Version


def fewest_requests(view: FleetView) -> list[Assignment]:
    """Each, in order of the queue, to the instance that has the fewest.

    Room is an instance's `capacity`, and a KV cache that is not full yet: what a trajectory needs
    of it is not asked. One with turns goes where its cache may still be, if there is room.
    """
    fleet = _Fleet(
        view.instances,
        rank=lambda load, tokens: load.num_running,
        has_place=lambda load, tokens: True,
    )
    proposals: list[Assignment] = []
    most = most_assignments(len(view.instances))
    if not fleet.num_open:
        return proposals
    for trajectory in view.queue:
        load = fleet.home(trajectory)
        if load is None:
            able = [v for v in fleet.versions if v >= trajectory.min_version]
            found = [load for v in able if (load := fleet.best(v, 0)) is not None]
            load = min(found, key=lambda each: (each.num_running, each.place), default=None)
        if load is None:
            continue
        proposals.append(fleet.give(load, trajectory))
        if not fleet.num_open or len(proposals) == most:
            break
    return proposals


def waterfall(view: FleetView) -> list[Assignment]:
    """Each to the instance that gains most by it (StaleFlow, routing strategy).

    A new trajectory tries the instances of the highest version first, so that it starts as fresh as
    may be; a partial one those of the lowest that may have it, which leaves the fresh ones to the
    new. Of these the one with the largest gain in throughput is taken if it loses none or is empty,
    else the next version is tried. (StaleFlow's mu is 0: its authors take 0.2 to 0.3, and in our
    measurements 0 trains more, docs/lab/scheduling.md.)
    Instances on which anything waits are left out. One with turns goes where its cache may still
    be, if that instance has room and loses none: it need not be prefilled there.
    """
    gain = view.settings.cost.gain
    fleet = _Fleet(
        [each for each in view.instances if not each.waiting],
        rank=lambda load, tokens: -gain(load.num_running, load.kv_tokens, tokens),
        has_place=lambda load, tokens: fits(load.kv_tokens, tokens, load.instance),
    )
    proposals: list[Assignment] = []
    most = most_assignments(len(view.instances))
    for trajectory in view.queue:
        if trajectory.version is None and view.num_returning:
            break
        load = _most_gain(trajectory, fleet, gain)
        if load is None:
            break
        proposals.append(fleet.give(load, trajectory))
        if len(proposals) == most:
            break
    return proposals


def _most_gain(
    trajectory: TrajectoryView, fleet: _Fleet, gain: Callable[[int, int, int], float]
) -> _Load | None:
    """Its home, or the best of the first version whose best gains by it."""
    tokens = trajectory.tokens

    def accepts(load: _Load) -> bool:
        return not load.num_running or gain(load.num_running, load.kv_tokens, tokens) >= 0

    load = fleet.home(trajectory)
    if load is not None and fleet.has_place(load, tokens) and accepts(load):
        return load
    for version in fleet.versions if trajectory.version is not None else fleet.versions[::-1]:
        if version >= trajectory.min_version:
            load = fleet.best(version, tokens)
            if load is not None and accepts(load):
                return load
    return None


class _Load:
    """An instance with what this answer has given it."""

    __slots__ = ("instance", "kv_tokens", "num_running", "place")

    def __init__(self, instance: InstanceView, place: int) -> None:
        self.instance, self.place = instance, place
        self.num_running, self.kv_tokens = len(instance.assigned), instance.kv_tokens

    def has_room(self) -> bool:
        return (
            self.num_running < self.instance.capacity and self.kv_tokens < self.instance.kv_capacity
        )


class _Fleet:
    """Instances with room; of each version the one of the lowest rank, then the first that joined.

    `rank` and `has_place` are of an instance, for a trajectory of so many tokens.
    """

    def __init__(
        self,
        instances: Iterable[InstanceView],
        *,
        rank: Callable[[_Load, int], float],
        has_place: Callable[[_Load, int], bool],
    ) -> None:
        self._with_room: dict[Version, list[tuple[int, InstanceView]]] = {}
        for place, instance in enumerate(instances):
            if instance.has_room():
                self._with_room.setdefault(instance.version, []).append((place, instance))
        self.versions = sorted(self._with_room)
        self.num_open = sum(map(len, self._with_room.values()))
        """Instances that still have room."""
        self._rank, self.has_place = rank, has_place
        self._loads: dict[Version, dict[InstanceId, _Load]] = {}
        """Of versions that were asked for: many ticks ask for one of several."""
        self._heaps: dict[Version, dict[int, list[tuple[float, int, int, _Load]]]] = {
            version: {} for version in self.versions
        }
        """For each power of two of tokens: rank, place, `num_running` then, load. An entry whose
        `num_running` is not the load's is out of date."""

    def _loads_of(self, version: Version) -> dict[InstanceId, _Load]:
        if version not in self._loads:
            with_room = self._with_room[version]
            self._loads[version] = {x.name: _Load(x, place) for place, x in with_room}
        return self._loads[version]

    def home(self, trajectory: TrajectoryView) -> _Load | None:
        """The instance whose cache may still have it, if it may go there and that has room."""
        if trajectory.home is None:
            return None
        for version in self.versions:
            load = self._loads_of(version).get(trajectory.home)
            if load is not None:
                return load if version >= trajectory.min_version and load.has_room() else None
        return None

    def best(self, version: Version, tokens: int) -> _Load | None:
        """The lowest rank among the instances of `version` that have a place for `tokens`."""
        size = weighed(tokens)
        if size not in self._heaps[version]:
            loads, rank = self._loads_of(version).values(), self._rank
            heap = [(rank(x, size), x.place, x.num_running, x) for x in loads if x.has_room()]
            heapify(heap)
            self._heaps[version][size] = heap
        heap, found = self._heaps[version][size], None
        without_place = []
        while heap and found is None:
            _, _, num_running, load = heap[0]
            is_current = num_running == load.num_running and load.has_room()
            if not is_current or not self.has_place(load, size):
                heappop(heap)  # out of date, or too full for any trajectory of this heap
            elif self.has_place(load, tokens):
                found = load
            else:
                without_place.append(heappop(heap))
        for entry in without_place:
            heappush(heap, entry)
        return found

    def give(self, load: _Load, trajectory: TrajectoryView) -> Assignment:
        """Count a trajectory as the instance's from now on."""
        load.num_running += 1
        load.kv_tokens += trajectory.tokens
        if load.has_room():
            for size, heap in self._heaps[load.instance.version].items():
                heappush(heap, self._entry(load, size))
        else:
            self.num_open -= 1
        return Assignment(trajectory.id, load.instance.name)

    def _entry(self, load: _Load, size: int) -> tuple[float, int, int, _Load]:
        return self._rank(load, size), load.place, load.num_running, load
