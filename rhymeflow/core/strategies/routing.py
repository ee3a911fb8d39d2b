"""Routing: which of what waits goes to which instance.

Holds true of both rules: an assignment names an instance that accepts, holds at least the
trajectory's `min_version` and has room, counting what this very answer has given it already; no
trajectory is assigned twice; the view is only read. Among equals the first that joined is taken, so
one view has one answer.

**A block ends the tick.** The queue comes in levels: V_traj, oldest first, then what is new.
`waterfall` stops at the first trajectory that has no place, so nothing behind it can take what it
waits for: old work is never overtaken by newer, nor a long response by shorter ones of its level.
(StaleFlow blocks the levels below only; then one that needs much room could be passed again and
again.) It also makes a tick in which nothing fits cost one look at the fleet, however long the
queue is. `fewest_requests` does not block: whatever has no place is passed over.

**Tokens are weighed by powers of two.** Which instance gains most depends on the trajectory's
tokens. Instances are compared at the largest power of two not above them, so a heap for each size
that occurs finds the best in O(log instances); whether its gain is enough is then judged by the
exact number.

**Room to grow.** `waterfall` leaves a share of each cache free (`kv_headroom`), for what runs there
grows. Without it a full fleet spends its time on preempting, sending back and routing again: 2.0
million interruptions of 10 thousand responses in one simulated run (docs/lab-log.md). An instance
whose cache overflows all the same has something waiting, and gets nothing more until that is
decoded or sent back.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

from rhymeflow.core.strategies.base import (
    MAX_ASSIGNMENTS,
    Assignment,
    FleetView,
    InstanceView,
    Settings,
    TrajectoryView,
)
from rhymeflow.core.types import Version


def has_room(instance: InstanceView) -> bool:
    """Whether anything at all may be routed to it."""
    return (
        instance.accepts
        and len(instance.assigned) < instance.capacity
        and instance.kv_tokens < instance.kv_capacity
    )


def fits(kv_tokens: int, tokens: int, instance: InstanceView, settings: Settings) -> bool:
    """Whether so many tokens fit beside so many, with headroom."""
    return kv_tokens + tokens <= (1 - settings.kv_headroom) * instance.kv_capacity


def weighed(tokens: int) -> int:
    """The number of tokens that instances are compared at: a power of two (or 0), at most a factor
    of two below."""
    return 1 << tokens.bit_length() >> 1


def fewest_requests(view: FleetView) -> list[Assignment]:
    """Each, in order of the queue, to the instance that has the fewest.

    Room is an instance's `capacity`, and a KV cache that is not full yet: what a trajectory needs
    of it is not asked. O(log instances) for each trajectory while any instance has room.
    """
    heaps: dict[Version, list[tuple[int, int]]] = {}
    for place, instance in enumerate(view.instances):
        if has_room(instance):
            heaps.setdefault(instance.version, []).append((len(instance.assigned), place))
    for heap in heaps.values():
        heapify(heap)
    kv_tokens: dict[int, int] = {}
    proposals: list[Assignment] = []
    if not heaps:
        return proposals
    for trajectory in view.queue:
        able = [heap for version, heap in heaps.items() if version >= trajectory.min_version]
        if not able:
            continue
        heap = min(able)
        count, place = heap[0]
        instance = view.instances[place]
        proposals.append(Assignment(trajectory.id, instance.name))
        kv_tokens[place] = kv_tokens.get(place, instance.kv_tokens) + trajectory.tokens
        if count + 1 < instance.capacity and kv_tokens[place] < instance.kv_capacity:
            heapreplace(heap, (count + 1, place))
        elif len(heap) > 1:
            heappop(heap)
        else:
            del heaps[instance.version]
        if not heaps or len(proposals) == MAX_ASSIGNMENTS:
            break
    return proposals


def waterfall(view: FleetView) -> list[Assignment]:
    """Each to the instance that gains most by it, if that is enough (StaleFlow, routing strategy).

    Classes are the instances of one version. A new trajectory tries the highest version first, so
    that it starts as fresh as may be; a partial one the lowest that may have it, which leaves the
    fresh ones to the new. Within a class the instance with the largest gain in throughput is the
    candidate; it is taken if it gains at least `routing_gain` times what an empty instance would,
    or is empty. Else the next class is tried. Instances on which anything waits are left out.

    O(log instances) for each assignment, O(instances) for the tick. (An instance that is first by
    gain but lacks KV room for this very trajectory is looked at again for the next.)
    """
    classes = _classes(view)
    ascending = sorted(classes)
    descending = ascending[::-1]
    proposals: list[Assignment] = []
    if not classes:
        return proposals
    for trajectory in view.queue:
        if trajectory.version is None and view.num_returning:
            break
        for version in descending if trajectory.version is None else ascending:
            if version < trajectory.min_version:
                continue
            load = classes[version].accepting(trajectory)
            if load is not None:
                break
        else:
            break
        proposals.append(Assignment(trajectory.id, load.instance.name))
        classes[version].add(load, trajectory.tokens)
        if len(proposals) == MAX_ASSIGNMENTS:
            break
    return proposals


def _classes(view: FleetView) -> dict[Version, _Class]:
    """Instances that have room and nothing waiting, by version."""
    loads: dict[Version, dict[int, _Load]] = {}
    for place, instance in enumerate(view.instances):
        if has_room(instance) and not instance.waiting:
            loads.setdefault(instance.version, {})[place] = _Load(instance, place)
    return {version: _Class(each, view.settings) for version, each in loads.items()}


class _Load:
    """An instance with what this tick has given it."""

    __slots__ = ("instance", "kv_tokens", "num_running", "place")

    def __init__(self, instance: InstanceView, place: int) -> None:
        self.instance, self.place = instance, place
        self.num_running = len(instance.assigned)
        self.kv_tokens = instance.kv_tokens

    def fits(self, tokens: int, settings: Settings) -> bool:
        return fits(self.kv_tokens, tokens, self.instance, settings)


class _Class:
    """Instances of one version; for each size weighed so far a heap, the largest gain first.

    An entry of a heap is (-gain, place, trajectories). It holds while the instance still has that
    many: more are only ever added.
    """

    def __init__(self, loads: dict[int, _Load], settings: Settings) -> None:
        self._loads, self._settings, self._cost = loads, settings, settings.cost
        self._heaps: dict[int, list[tuple[float, int, int]]] = {}

    def accepting(self, trajectory: TrajectoryView) -> _Load | None:
        """The candidate for this trajectory, if it gains enough."""
        tokens = trajectory.tokens
        load = self._best(tokens)
        if load is None or not load.num_running:
            return load
        gain = self._cost.gain(load.num_running, load.kv_tokens, tokens)
        enough = self._settings.routing_gain * self._cost.gain(0, 0, tokens)
        return load if gain >= enough else None

    def add(self, load: _Load, tokens: int) -> None:
        """The trajectory of so many tokens has been given to this instance."""
        load.num_running += 1
        load.kv_tokens += tokens
        if load.num_running == load.instance.capacity:
            return
        for size, heap in self._heaps.items():
            heappush(heap, self._entry(load, size))

    def _entry(self, load: _Load, size: int) -> tuple[float, int, int]:
        gain = self._cost.gain(load.num_running, load.kv_tokens, size)
        return -gain, load.place, load.num_running

    def _heap(self, size: int) -> list[tuple[float, int, int]]:
        if size not in self._heaps:
            able = [x for x in self._loads.values() if x.num_running < x.instance.capacity]
            self._heaps[size] = [self._entry(load, size) for load in able]
            heapify(self._heaps[size])
        return self._heaps[size]

    def _best(self, tokens: int) -> _Load | None:
        size = weighed(tokens)
        heap = self._heap(size)
        lack_room: list[tuple[float, int, int]] = []
        found = None
        while heap and found is None:
            load = self._loads[heap[0][1]]
            if load.num_running != heap[0][2] or not load.fits(size, self._settings):
                heappop(heap)  # out of date, or too full for any trajectory of this heap
            elif load.fits(tokens, self._settings):
                found = load
            else:
                lack_room.append(heappop(heap))
        for entry in lack_room:
            heappush(heap, entry)
        return found
