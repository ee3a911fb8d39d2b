"""The buffer of one training batch: which groups hold its entries.

A group is in it at most once; operations are amortised O(log n). `staleness.py` has the rules by
which groups take and leave entries."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Literal

from rhymeflow.core.types import GroupId, Version

BufferState = Literal["pending", "stuck", "ready", "ready_with_capacity"]

STATES: Mapping[tuple[bool, bool], BufferState] = {
    (False, True): "pending",
    (False, False): "stuck",
    (True, False): "ready",
    (True, True): "ready_with_capacity",
}
"""By (whether it has as many OCCUPIED entries as its target, whether any are EMPTY)."""

_SLACK = 16  # a heap is rebuilt when its stale entries outnumber the current ones by more than this


class Held(dict[GroupId, Version]):
    """Groups whose entries are in one state, with their versions.

    Args:
        sign: 1 if `first` is the oldest (the lowest version, then id); -1 if the newest."""

    __slots__ = ("_heap", "_sign")

    def __init__(self, sign: Literal[1, -1]) -> None:
        self._sign = sign
        self._heap: list[tuple[int, int]] = []

    def put(self, group: GroupId, version: Version) -> None:
        """Add a group, or change its version."""
        sign = self._sign
        self[group] = version
        heappush(self._heap, (sign * version, sign * group))
        if len(self._heap) > 2 * len(self) + _SLACK:
            self._heap = [(sign * v, sign * g) for g, v in self.items()]
            heapify(self._heap)

    def first(self) -> tuple[Version, GroupId] | None:
        """Return the version and id of the first group; None: there is none."""
        heap, sign = self._heap, self._sign
        while heap:
            version, group = sign * heap[0][0], sign * heap[0][1]
            if self.get(group) == version:
                return version, group
            heappop(heap)
        return None


class Buffer:
    """The entries of one batch, by state; the rest of its `size` are EMPTY.

    Args:
        target: OCCUPIED entries that make the batch complete.
        size: number of entries, EMPTY ones included."""

    __slots__ = ("occupied", "reserved", "size", "target")

    def __init__(self, target: int, size: int) -> None:
        self.target, self.size = target, size
        self.reserved = Held(-1)  # its `first` is the group that can wait longest
        self.occupied = Held(1)

    def __len__(self) -> int:
        return len(self.reserved) + len(self.occupied)

    @property
    def met(self) -> bool:
        """Whether the batch is complete."""
        return len(self.occupied) == self.target

    @property
    def room(self) -> int:
        """Number of EMPTY entries that may be taken: none once the batch is complete."""
        occupied = len(self.occupied)
        return 0 if occupied == self.target else self.size - occupied - len(self.reserved)

    @property
    def state(self) -> BufferState:
        """The state of the whole buffer."""
        return STATES[self.met, len(self) < self.size]

    def holding(self, group: GroupId) -> Held:
        """Return `reserved` or `occupied`, whichever has the group."""
        return self.reserved if group in self.reserved else self.occupied
