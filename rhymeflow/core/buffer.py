"""The book of one training batch: which groups hold its entries.

Holds true: a group is in it at most once; all operations are amortised O(log n). Knows nothing of
the other buffers, nor of the rules by which groups come and go (`staleness.py`).
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Literal

from rhymeflow.core.types import GroupId, Version

BufferState = Literal["pending", "ready", "ready_with_capacity", "stuck"]
"""`pending`: has EMPTY entries. `stuck`: has none, and some are RESERVED. `ready`: has met its
target, and has no entry left. `ready_with_capacity`: has met it with entries to spare."""

_SLACK = 16
"""Stale heap entries that are let be, beyond as many as there are good ones."""


class Buffer:
    """Entries of one batch: group -> version, by state; the rest of its `size` is EMPTY.

    Args:
        target: OCCUPIED entries that make the batch complete.
        size: entries in all.
    """

    __slots__ = ("_latest", "_oldest", "occupied", "reserved", "room", "size", "target")

    def __init__(self, target: int, size: int) -> None:
        self.target = target
        self.size = size
        self.reserved: dict[GroupId, Version] = {}
        self.occupied: dict[GroupId, Version] = {}
        self.room = size
        """EMPTY entries that may be taken; a complete batch takes nothing more."""
        self._latest: list[tuple[int, int]] = []
        self._oldest: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.reserved) + len(self.occupied)

    @property
    def met(self) -> bool:
        """Whether the batch is complete."""
        return len(self.occupied) == self.target

    @property
    def state(self) -> BufferState:
        """The state of the whole."""
        if self.met:
            return "ready" if len(self) == self.size else "ready_with_capacity"
        return "pending" if self.room else "stuck"

    def put_reserved(self, group: GroupId, version: Version) -> None:
        """RESERVE an entry, or give the group's RESERVED entry this version."""
        self.reserved[group] = version
        self._count()
        heappush(self._latest, (-version, -group))
        if len(self._latest) > 2 * len(self.reserved) + _SLACK:
            self._latest = [(-v, -g) for g, v in self.reserved.items()]
            heapify(self._latest)

    def put_occupied(self, group: GroupId, version: Version) -> None:
        """OCCUPY an entry."""
        assert not self.met
        self.occupied[group] = version
        self._count()
        heappush(self._oldest, (version, group))
        if len(self._oldest) > 2 * len(self.occupied) + _SLACK:
            self._oldest = [(v, g) for g, v in self.occupied.items()]
            heapify(self._oldest)

    def take(self, group: GroupId) -> Version:
        """EMPTY the group's entry; its version."""
        held = self.reserved if group in self.reserved else self.occupied
        version = held.pop(group)
        self._count()
        return version

    def latest_reserved(self) -> tuple[Version, GroupId] | None:
        """The RESERVED group that can wait longest: of the highest version, then drawn last."""
        heap, reserved = self._latest, self.reserved
        while heap:
            version, group = heap[0]
            if reserved.get(-group) == -version:
                return -version, -group
            heappop(heap)
        return None

    def oldest_occupied(self) -> tuple[Version, GroupId] | None:
        """The OCCUPIED group of the lowest version, then drawn first."""
        heap, occupied = self._oldest, self.occupied
        while heap:
            version, group = heap[0]
            if occupied.get(group) == version:
                return version, group
            heappop(heap)
        return None

    def _count(self) -> None:
        occupied = len(self.occupied)
        met = occupied == self.target
        self.room = 0 if met else self.size - occupied - len(self.reserved)
