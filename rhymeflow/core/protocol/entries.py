"""The entries of all buffers: which group holds which entry, and under which version.

A group holds at most one entry, in a buffer of its window that is not consumed. `staleness.py`
decides which, and changes it through the methods at the end."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from rhymeflow.core.protocol.buffer import Buffer, BufferState
from rhymeflow.core.types import GroupId, Version

EntryState = Literal["EMPTY", "RESERVED", "OCCUPIED"]

OPERATIONS: Mapping[str, Mapping[EntryState, EntryState]] = {
    "reserve": {"EMPTY": "RESERVED"},
    "tighten": {"RESERVED": "RESERVED"},
    "occupy": {"RESERVED": "OCCUPIED"},
    "release": {"RESERVED": "EMPTY", "OCCUPIED": "EMPTY"},
    "consume": {"OCCUPIED": "EMPTY"},
}
"""How each operation changes the state of a group's entry; a group without an entry is EMPTY."""


class ProtocolError(AssertionError):
    """An operation that the protocol does not allow: always a defect in the caller."""


class Entries:
    """All buffers that are not consumed yet, and the entry of each group.

    Args:
        groups_per_batch: OCCUPIED entries that make a batch complete.
        extra_groups: entries of each buffer beyond `groups_per_batch`.
        max_staleness: the bound, in versions.
        num_batches: buffers 0 .. num_batches - 1 exist; no group is admitted beyond them, so that
            no group is left when the run ends."""

    def __init__(
        self, *, groups_per_batch: int, extra_groups: int, max_staleness: int, num_batches: int
    ) -> None:
        assert groups_per_batch > 0
        assert min(extra_groups, max_staleness, num_batches) >= 0
        self.groups_per_batch = groups_per_batch
        self.extra_groups = extra_groups
        self.max_staleness = max_staleness
        self.num_batches = num_batches
        self.first: Version = 0  # the buffer to be consumed next
        self._size = groups_per_batch + extra_groups
        self.by_version: dict[Version, Buffer] = {}
        """The buffers that hold or have held a group. Callers only read it."""
        self._place: dict[GroupId, Version] = {}
        self._holes: set[Version] = set()
        """Buffers whose EMPTY entries an OCCUPIED group of a later buffer might take."""

    # -- queries -----------------------------------------------------------------------------

    def window(self, version: Version) -> range:
        """Return the buffers, lowest first, in which a group of this version may hold an entry."""
        end = min(version + self.max_staleness, self.num_batches - 1)
        return range(max(version, self.first), end + 1)

    def admissible(self, version: Version) -> bool:
        """Whether a new group started at `version` would find an entry."""
        return self._highest_empty(version) is not None

    def place(self, group: GroupId) -> Version | None:
        """Return the buffer in which the group holds an entry; None: it holds none."""
        return self._place.get(group)

    def version(self, group: GroupId) -> Version:
        """Return the version of a group that holds an entry: the least of its members'."""
        if group not in self._place:
            raise ProtocolError(f"group {group} holds no entry")
        return self.by_version[self._place[group]].holding(group)[group]

    def ready(self) -> bool:
        """Whether the first buffer has met its target and can be consumed."""
        buffer = self.by_version.get(self.first)
        return buffer is not None and buffer.met

    def state(self, number: Version) -> BufferState:
        """Return the state of a buffer; `ProtocolError` if it does not exist."""
        if not self.first <= number < self.num_batches:
            raise ProtocolError(f"buffer {number} does not exist")
        buffer = self.by_version.get(number)
        return "pending" if buffer is None else buffer.state

    def reserved_in(self, number: Version) -> tuple[GroupId, ...]:
        """Return the groups that are RESERVED in this buffer, in ascending order."""
        buffer = self.by_version.get(number)
        return () if buffer is None else tuple(sorted(buffer.reserved))

    def occupied_in(self, number: Version) -> Collection[GroupId]:
        """Return the groups that are OCCUPIED in this buffer."""
        buffer = self.by_version.get(number)
        return () if buffer is None else buffer.occupied.keys()

    def num_empty(self) -> int:
        """Return the number of EMPTY entries that can still be reserved, over all buffers."""
        untouched = self.num_batches - self.first - len(self.by_version)
        return untouched * self._size + sum(b.room for b in self.by_version.values())

    # -- changes -----------------------------------------------------------------------------

    def _check(self, operation: str, group: GroupId) -> None:
        """Raise `ProtocolError` unless `OPERATIONS` has this operation for the group's entry."""
        place, state = self._place.get(group), "EMPTY"
        if place is not None:
            state = "RESERVED" if group in self.by_version[place].reserved else "OCCUPIED"
        if state not in OPERATIONS[operation]:
            raise ProtocolError(f"{operation}: the entry of group {group} is {state}")

    def _room(self, number: Version) -> int:
        buffer = self.by_version.get(number)
        return self._size if buffer is None else buffer.room

    def _highest_empty(self, version: Version) -> Version | None:
        for number in reversed(self.window(version)):
            if self._room(number):
                return number
        return None

    def _take(self, group: GroupId) -> Version:
        """Make the group's entry EMPTY; return the group's version."""
        return self.by_version[self._place.pop(group)].holding(group).pop(group)

    def _move(self, group: GroupId, target: Version) -> Version:
        """Move the group, in its state, to an EMPTY entry of `target`; return its old buffer."""
        source = self._place[group]
        is_reserved = group in self.by_version[source].reserved
        version = self._take(group)
        buffer = self._enter(group, version, target)
        (buffer.reserved if is_reserved else buffer.occupied).put(group, version)
        return source

    def _enter(self, group: GroupId, version: Version, target: Version) -> Buffer:
        """Record the group in `target` and return that buffer. Only this checks the window."""
        assert max(version, self.first) <= target <= version + self.max_staleness, (version, target)
        assert target < self.num_batches
        buffer = self.by_version.get(target)
        if buffer is None:
            buffer = self.by_version[target] = Buffer(self.groups_per_batch, self._size)
        assert buffer.room, f"buffer {target} takes nothing more"
        self._place[group] = target
        return buffer
