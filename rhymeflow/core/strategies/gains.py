"""Instances that have room and nothing waiting, by version, and who gains most by a trajectory.

Most of a fleet is as it was in the last tick: an instance that has not changed is shown by the very
same view, so only what is new is entered again. A tick costs O(changes · log instances), and a
comparison for each instance; answers follow from the view alone (`test_routing.py`). Entries of
heaps that are out of date are left out when they come first; a heap of mostly such is made anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import compress, count
from operator import is_not

from rhymeflow.core.strategies.base import (
    FleetView,
    InstanceView,
    Settings,
    TrajectoryView,
    fits,
    weighed,
)
from rhymeflow.core.types import InstanceId, Version

_Entry = tuple[float, int, int]
"""Minus the gain, the instance's place, and the stamp that its load had then."""


class Load:
    """An instance with what this tick has given it."""

    __slots__ = ("instance", "kv_tokens", "num_running", "place", "stamp")

    def __init__(self, instance: InstanceView, place: int, stamp: int) -> None:
        self.instance, self.place, self.stamp = instance, place, stamp
        self.num_running = len(instance.assigned)
        self.kv_tokens = instance.kv_tokens

    def fits(self, tokens: int, settings: Settings) -> bool:
        """Whether so many tokens fit beside its own."""
        return fits(self.kv_tokens, tokens, self.instance, settings)

    def is_as(self, instance: InstanceView) -> bool:
        """Whether the view shows what is counted here."""
        return (self.num_running, self.kv_tokens, *self.instance[1:4]) == (
            len(instance.assigned), instance.kv_tokens, *instance[1:4]
        )  # fmt: skip


class Class:
    """Instances of one version; for each size weighed so far a heap, the largest gain first."""

    def __init__(self, settings: Settings) -> None:
        self.loads: dict[int, Load] = {}
        self._settings, self._cost = settings, settings.cost
        self._heaps: dict[int, list[_Entry]] = {}
        self._behind: dict[int, set[int]] = {}
        """For each size, the places whose change its heap has not seen."""
        self._stamps = count()

    def put(self, instance: InstanceView, place: int) -> None:
        """The instance at this place is of this version now, or has changed."""
        self.loads[place] = Load(instance, place, next(self._stamps))
        self._has_changed(place)

    def accepting(self, trajectory: TrajectoryView) -> Load | None:
        """The candidate for this trajectory, if it gains by it."""
        tokens = trajectory.tokens
        load = self._best(tokens)
        return load if load is None or self._gains(load, tokens) else None

    def has_room_at(self, place: int, tokens: int) -> Load | None:
        """The instance at this place, if it is of this class and would take so many tokens."""
        load = self.loads.get(place)
        if load is None or load.num_running >= load.instance.capacity:
            return None
        is_able = load.fits(tokens, self._settings) and self._gains(load, tokens)
        return load if is_able else None

    def _gains(self, load: Load, tokens: int) -> bool:
        """An empty instance is taken whatever it gains."""
        used = load.num_running, load.kv_tokens
        return not load.num_running or self._cost.gain(*used, tokens) >= 0

    def add(self, load: Load, tokens: int) -> None:
        """The trajectory of so many tokens has been given to this instance."""
        load.num_running += 1
        load.kv_tokens += tokens
        load.stamp = next(self._stamps)
        self._has_changed(load.place)

    def forget_old(self) -> None:
        """Leave out heaps of which most is out of date: they are made anew when asked for."""
        for size in [s for s, heap in self._heaps.items() if len(heap) > 4 * len(self.loads) + 64]:
            del self._heaps[size], self._behind[size]

    def _has_changed(self, place: int) -> None:
        for behind in self._behind.values():
            behind.add(place)

    def _heap(self, size: int) -> list[_Entry]:
        """The heap of this size, up to date."""
        if size not in self._heaps:
            heap = self._heaps[size] = list(self._entries(self.loads, size))
            heapify(heap)
            self._behind[size] = set()
        heap, behind = self._heaps[size], self._behind[size]
        for entry in self._entries(behind, size):
            heappush(heap, entry)
        behind.clear()
        return heap

    def _entries(self, places: set[int] | dict[int, Load], size: int) -> Iterator[_Entry]:
        for place in places:
            load = self.loads.get(place)
            if load is not None and load.num_running < load.instance.capacity:
                gain = self._cost.gain(load.num_running, load.kv_tokens, size)
                yield -gain, place, load.stamp

    def _best(self, tokens: int) -> Load | None:
        size = weighed(tokens)
        heap = self._heap(size)
        lack_room: list[_Entry] = []
        found = None
        while heap and found is None:
            load = self.loads.get(heap[0][1])
            if load is None or load.stamp != heap[0][2] or not load.fits(size, self._settings):
                heappop(heap)  # out of date, or too full for any trajectory of this heap
            elif load.fits(tokens, self._settings):
                found = load
            else:
                lack_room.append(heappop(heap))
        for entry in lack_room:
            heappush(heap, entry)
        return found


class Gains:
    """The classes of a fleet, brought up to date by `show`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.classes: dict[Version, Class] = {}
        self._views: tuple[InstanceView, ...] = ()
        self._places: dict[InstanceId, int] = {}
        self._versions: dict[int, Version] = {}  # for each place that has a load, its class
        self._given: set[int] = set()
        """Places whose load counts what was given since the last view."""

    def show(self, view: FleetView) -> dict[Version, Class]:
        """The classes as they are in this view."""
        old, new = self._views, view.instances
        changed = self._given.union(compress(count(), map(is_not, old, new)))
        changed.update(range(min(len(old), len(new)), max(len(old), len(new))))
        for place in changed:
            self._enter(place, new[place] if place < len(new) else None)
            if place < len(new):
                self._places[new[place].name] = place
        self._views = new
        self._given.clear()
        for version in [v for v, each in self.classes.items() if not each.loads]:
            del self.classes[version]
        for each in self.classes.values():
            each.forget_old()
        return self.classes

    def give(self, load: Load, tokens: int) -> None:
        """A trajectory of so many tokens goes to this instance."""
        self._given.add(load.place)
        self.classes[load.instance.version].add(load, tokens)

    def home(self, trajectory: TrajectoryView) -> Load | None:
        """Where its cache may be, if it can go there."""
        if trajectory.home is None:
            return None
        place = self._places.get(trajectory.home, -1)
        version = self._versions.get(place)
        if version is None or version < trajectory.min_version:
            return None
        return self.classes[version].has_room_at(place, trajectory.tokens)

    def _enter(self, place: int, instance: InstanceView | None) -> None:
        able = instance is not None and instance.has_room() and not instance.waiting
        version = self._versions.get(place)
        if version is not None:
            loads = self.classes[version].loads
            if able and instance is not None and loads[place].is_as(instance):
                loads[place].instance = instance
                return
            del loads[place], self._versions[place]
        if able and instance is not None:
            if instance.version not in self.classes:
                self.classes[instance.version] = Class(self.settings)
            self.classes[instance.version].put(instance, place)
            self._versions[place] = instance.version
