"""Routing: which waiting trajectory goes to which instance.

An assignment names an instance that accepts and has room, with the assignments that precede it in
the same list counted. Ties go to the instance that joined first, so routing is deterministic.

**A block ends the tick.** `waterfall` stops at the first trajectory that fits nowhere, so none
behind it can take the room it waits for: older work is never overtaken by newer, nor a long
response by shorter ones of its version. (StaleFlow blocks newer versions only; there, a trajectory
that needs much room could be overtaken again and again.) A tick in which nothing fits also costs
only one pass over the fleet. `fewest_requests` skips trajectories that fit nowhere.

**Instances are compared at powers of two.** They are ranked for the largest power of two not above
a trajectory's tokens: a tick builds one heap per size that occurs, which finds the best instance in
O(log instances). Whether the gain is enough is then decided by the exact number of tokens.

**Room to grow.** `waterfall` leaves a share of each cache free (`KV_HEADROOM`), since the running
responses grow. Without it a full fleet spends its time on preempting and rerouting: 2.0 million
interruptions of 10 thousand responses in one simulated run (docs/lab-log.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from rhymeflow.core.strategies.base import (
    Assignment,
    FleetView,
    InstanceView,
    TrajectoryView,
    assignment_limit,
    fits,
    size_class,
)
from rhymeflow.core.types import InstanceId, Version


def fewest_requests(view: FleetView) -> list[Assignment]:
    """Route each trajectory, in queue order, to the instance with the fewest trajectories. An
    instance has room below its `capacity` while its KV cache is not full; how many tokens the
    trajectory adds does not matter. A later turn goes to the trajectory's home if that has room."""
    fleet = _Fleet(
        view.instances,
        rank=lambda load, tokens: load.num_running,
        has_place=lambda load, tokens: True,
    )
    proposals: list[Assignment] = []
    most = assignment_limit(len(view.instances))
    if not fleet.num_open:
        return proposals
    for trajectory in view.queue:
        load = fleet.home(trajectory)
        if load is None:
            able = [v for v in fleet.versions if v >= trajectory.min_version]
            loads = [load for v in able if (load := fleet.best(v, 0)) is not None]
            load = min(loads, key=lambda each: (each.num_running, each.index), default=None)
        if load is None:
            continue
        proposals.append(fleet.assign(load, trajectory))
        if not fleet.num_open or len(proposals) == most:
            break
    return proposals


def waterfall(view: FleetView) -> list[Assignment]:
    """Route each trajectory to the instance that gains most throughput (StaleFlow, routing).

    A new trajectory tries the instances of the highest version first, so that it starts as fresh as
    possible; a partial one tries the lowest version allowed first, which leaves the fresh instances
    to new ones. The instance with the largest gain in throughput is taken if the gain is not
    negative or the instance is empty; else the next version is tried. (This is StaleFlow with mu =
    0; its authors use 0.2 to 0.3, but we measured more training with 0, docs/lab/scheduling.md.)
    Instances on which anything waits are left out. A later turn goes to the trajectory's
    home, where its cache may still be, if that has room and loses no throughput."""
    gain = view.settings.cost.gain
    fleet = _Fleet(
        [each for each in view.instances if not each.waiting],
        rank=lambda load, tokens: -gain(load.num_running, load.kv_tokens, tokens),
        has_place=lambda load, tokens: fits(load.kv_tokens, tokens, load.instance),
    )
    proposals: list[Assignment] = []
    most = assignment_limit(len(view.instances))
    for trajectory in view.queue:
        if trajectory.version is None and view.num_returning:
            break
        load = _most_gain(trajectory, fleet, gain)
        if load is None:
            break
        proposals.append(fleet.assign(load, trajectory))
        if len(proposals) == most:
            break
    return proposals


def _most_gain(
    trajectory: TrajectoryView, fleet: _Fleet, gain: Callable[[int, int, int], float]
) -> _Load | None:
    """Choose the trajectory's home, or else the best instance of the first version that gains."""
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
    """The load of an instance, with the assignments proposed so far; `index`: as it joined."""

    __slots__ = ("index", "instance", "kv_tokens", "num_running")

    def __init__(self, instance: InstanceView, index: int) -> None:
        self.instance, self.index = instance, index
        self.num_running, self.kv_tokens = len(instance.assigned), instance.kv_tokens

    def has_room(self) -> bool:
        return (
            self.num_running < self.instance.capacity and self.kv_tokens < self.instance.kv_capacity
        )


class _Fleet:
    """The instances with room, and the best of each version: the lowest rank, then first to join.
    `rank` and `has_place` take an instance's load and a trajectory's tokens; `has_place` says
    whether its cache has room for them."""

    def __init__(
        self,
        instances: Iterable[InstanceView],
        *,
        rank: Callable[[_Load, int], float],
        has_place: Callable[[_Load, int], bool],
    ) -> None:
        self._with_room: dict[Version, list[tuple[int, InstanceView]]] = {}
        for index, instance in enumerate(instances):
            if instance.has_room():
                self._with_room.setdefault(instance.version, []).append((index, instance))
        self.versions = sorted(self._with_room)
        self.num_open = sum(map(len, self._with_room.values()))  # instances that still have room
        self._rank, self.has_place = rank, has_place
        self._loads: dict[Version, dict[InstanceId, _Load]] = {}
        """By version, created on demand: many ticks need one version of several."""
        self._heaps: dict[Version, dict[int, list[tuple[float, int, int, _Load]]]] = {
            version: {} for version in self.versions
        }
        """By version and power of two of tokens: (rank, index, `num_running` when added, load). An
        entry whose `num_running` is no longer the load's is out of date."""

    def _loads_of(self, version: Version) -> dict[InstanceId, _Load]:
        if version not in self._loads:
            with_room = self._with_room[version]
            self._loads[version] = {x.name: _Load(x, index) for index, x in with_room}
        return self._loads[version]

    def home(self, trajectory: TrajectoryView) -> _Load | None:
        """Return the trajectory's home, if it may run there and that has room, or None."""
        if trajectory.home is None:
            return None
        for version in self.versions:
            load = self._loads_of(version).get(trajectory.home)
            if load is not None:
                return load if version >= trajectory.min_version and load.has_room() else None
        return None

    def best(self, version: Version, tokens: int) -> _Load | None:
        """Return the instance of `version` with the lowest rank that fits `tokens`, or None."""
        size = size_class(tokens)
        if size not in self._heaps[version]:
            loads, rank = self._loads_of(version).values(), self._rank
            heap = [(rank(x, size), x.index, x.num_running, x) for x in loads if x.has_room()]
            heapify(heap)
            self._heaps[version][size] = heap
        heap, best = self._heaps[version][size], None
        without_place = []  # has no place for these tokens, but for a smaller trajectory's
        while heap and best is None:
            _, _, num_running, load = heap[0]
            is_current = num_running == load.num_running and load.has_room()
            if not is_current or not self.has_place(load, size):
                heappop(heap)  # out of date, or too full for any trajectory of this heap
            elif self.has_place(load, tokens):
                best = load
            else:
                without_place.append(heappop(heap))
        for entry in without_place:
            heappush(heap, entry)
        return best

    def assign(self, load: _Load, trajectory: TrajectoryView) -> Assignment:
        """Add a trajectory to an instance's load and return the assignment."""
        load.num_running += 1
        load.kv_tokens += trajectory.tokens
        if load.has_room():
            for size, heap in self._heaps[load.instance.version].items():
                heappush(heap, self._entry(load, size))
        else:
            self.num_open -= 1
        return Assignment(trajectory.id, load.instance.name)

    def _entry(self, load: _Load, size: int) -> tuple[float, int, int, _Load]:
        return self._rank(load, size), load.index, load.num_running, load
