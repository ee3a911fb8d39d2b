"""The staleness protocol: which training batch a group of trajectories may end up in.

Theory (StaleFlow, arXiv 2601.12784, section on the consistency protocol; words in
ARCHITECTURE.md). Buffer b is the book for the batch that the learner consumes at version b;
consuming it makes version b + 1. It has `groups_per_batch` entries, each

    EMPTY --reserve--> RESERVED --occupy--> OCCUPIED --consume--> (gone with its buffer)
                          |                    |
                          +------release-------+--> EMPTY

A group of version v (the least version at which one of its members was started) may hold an entry
of buffer b only if

    v <= b <= v + max_staleness.                                                       (window)

| operation | entry taken |
| --- | --- |
| reserve | the highest EMPTY one in the window |
| tighten | the one held, or the highest EMPTY one in the smaller window |
| occupy | the lowest one in the window, up to the one held, that is EMPTY or can be made so |
| release | none: the group ended without being trained on |
| consume | all of the first buffer, all OCCUPIED |

Before generation starts nobody knows how long it will last, so `reserve` counts on the worst and
leaves the early entries to those that must have them; `occupy` fills the next batch first. An entry
can be made EMPTY if the group that RESERVED it may move later, into the entry being given up
(backfill). So a group never ends later than where it was reserved. `tighten` serves a member that
starts late, on an instance that is behind its siblings'.

**The bound.** Every operation that puts group g of version v into buffer b checks the window, and
`tighten`, the only one that lowers v, checks it anew for the entry held. So whenever b is consumed,
each of its groups has v >= b - max_staleness: law 1. Versions of members are never lower than the
group's, so it holds for every trajectory.

**No deadlock.** An entry is reserved before generation starts and an occupied group never needs
more room than it reserved, so whatever is running can always be taken in. Buffers are consumed in
order, and the first buffer can always be completed by groups of the current version v = first
buffer, whose window begins there.

Knows nothing of instances, members or time; ids are ints.
"""

from __future__ import annotations

from collections.abc import Iterable

from rhymeflow.core.buffer import Buffer, BufferState
from rhymeflow.core.types import GroupId, Version


class ProtocolError(AssertionError):
    """An operation that the protocol does not allow: a defect in the caller, never bad luck.

    It is raised before anything is changed.
    """


class StalenessBuffers:
    """The books of all batches that are not consumed yet.

    Args:
        groups_per_batch: OCCUPIED entries that make a batch complete.
        extra_groups: entries of each buffer beyond them.
        max_staleness: the bound, in versions.
        num_batches: buffers 0 .. num_batches - 1 exist; beyond them nothing is admitted, so that
            the run ends with nothing left over.
    """

    def __init__(
        self, *, groups_per_batch: int, extra_groups: int, max_staleness: int, num_batches: int
    ) -> None:
        assert groups_per_batch > 0
        assert extra_groups >= 0
        assert max_staleness >= 0
        assert num_batches >= 0
        self.groups_per_batch = groups_per_batch
        self.extra_groups = extra_groups
        self.max_staleness = max_staleness
        self.num_batches = num_batches
        self.first: Version = 0
        """The buffer to be consumed next."""
        self._size = groups_per_batch + extra_groups
        self._buffers: dict[Version, Buffer] = {}
        self._place: dict[GroupId, Version] = {}
        self._num_empty = num_batches * self._size
        self._holes: set[Version] = set()
        """Buffers that may have an entry which finished work from later ones could take."""

    # -- questions ---------------------------------------------------------------------------

    def window(self, version: Version) -> range:
        """Buffers, lowest first, that a group of this version may sit in."""
        end = min(version + self.max_staleness, self.num_batches - 1)
        return range(max(version, self.first), end + 1)

    def admissible(self, version: Version) -> bool:
        """Whether a new group started at `version` would find an entry."""
        return self._highest_empty(version) is not None

    def place(self, group: GroupId) -> Version | None:
        """The buffer the group holds an entry of; None: it holds none."""
        return self._place.get(group)

    def version(self, group: GroupId) -> Version:
        """The group's version: the least of its members'."""
        buffer = self._buffers[self._held_place(group)]
        return buffer.reserved[group] if group in buffer.reserved else buffer.occupied[group]

    def ready(self) -> bool:
        """Whether the first buffer has met its target and can be consumed."""
        buffer = self._buffers.get(self.first)
        return buffer is not None and buffer.met

    def state(self, number: Version) -> BufferState:
        """The state of a buffer that exists."""
        if not self.first <= number < self.num_batches:
            raise ProtocolError(f"buffer {number} does not exist")
        buffer = self._buffers.get(number)
        return "pending" if buffer is None else buffer.state

    def reserved_in(self, number: Version) -> tuple[GroupId, ...]:
        """The groups that are RESERVED in this buffer, in ascending order."""
        buffer = self._buffers.get(number)
        return () if buffer is None else tuple(sorted(buffer.reserved))

    def num_empty(self) -> int:
        """EMPTY entries that can still be reserved, over all buffers that exist."""
        return self._num_empty

    def books(self) -> dict[Version, Buffer]:
        """The buffers that hold, or have held, anything, by number. To look at, not to change."""
        return self._buffers

    # -- operations --------------------------------------------------------------------------

    def reserve(self, group: GroupId, version: Version) -> Version | None:
        """RESERVE the highest EMPTY entry in the window; None: not admitted (backpressure)."""
        if group in self._place:
            raise ProtocolError(f"group {group} already holds an entry")
        target = self._highest_empty(version)
        if target is not None:
            self._put_reserved(group, version, target)
        return target

    def tighten(self, group: GroupId, version: Version) -> bool:
        """Make room for a member that would start at `version`; False: it may not start there.

        A version that is not below the group's own changes nothing. A lower one becomes the
        group's, if the entry held lies in the smaller window, or else another can be had there.
        """
        place = self._reserved_place(group)
        own = self._buffers[place].reserved[group]
        if version >= own:
            return True
        if place <= version + self.max_staleness:
            self._buffers[place].put_reserved(group, version)
            return True
        target = self._highest_empty(version)
        if target is None:
            return False
        self._take(group)
        self._put_reserved(group, version, target)
        self._holes.add(place)
        self._pack_late((place,), self.first)
        return True

    def occupy(self, group: GroupId) -> tuple[GroupId, ...]:
        """Turn the group's reservation into the lowest OCCUPIED entry it can have.

        Returns:
            The surplus, in ascending order: groups that were RESERVED in a buffer whose target is
            now met. They hold no entry any more and are to be aborted.
        """
        place = self._reserved_place(group)
        version = self._take(group)
        floor = max(version, self.first)
        hole = self._pack_late((place,), floor)
        target = next(b for b in range(floor, place + 1) if self._room(b))
        self._put_occupied(group, version, target)
        self._holes.add(hole)
        return self._settle({target})

    def release(self, group: GroupId) -> tuple[GroupId, ...]:
        """EMPTY the group's entry: it will not be trained on. Returns the surplus, as `occupy`.

        There can be some: finished work of later buffers moves into the entry, and may complete
        this batch.
        """
        self._holes.add(self._held_place(group))
        self._take(group)
        return self._settle(set())

    def consume(self) -> tuple[GroupId, ...]:
        """Take the first buffer, which must be ready; its groups in ascending order.

        The order does not depend on who finished first: at `max_staleness` 0 the batch is the one
        the plain synchronous loop would train on.
        """
        if not self.ready():
            raise ProtocolError(f"buffer {self.first} is not ready")
        groups = self._buffers[self.first].occupied
        for group, version in groups.items():
            if version < self.first - self.max_staleness:
                raise ProtocolError(f"group {group} of version {version} in batch {self.first}")
        del self._buffers[self.first]
        for group in groups:
            del self._place[group]
        self._holes.discard(self.first)
        self.first += 1
        return tuple(sorted(groups))

    # -- the two packings --------------------------------------------------------------------

    def _settle(self, filled: set[Version]) -> tuple[GroupId, ...]:
        """Pack reservations late, then finished work early, until nothing moves; the surplus."""
        self._pack_late(self._holes, self.first)
        while (moved := self._pack_one_early()) is not None:
            source, target = moved
            filled.add(target)
            self._holes.add(source)
            self._pack_late((source,), self.first)
        self._holes.clear()
        surplus: list[GroupId] = []
        for number in filled:
            buffer = self._buffers[number]
            if buffer.met and buffer.reserved:
                surplus += buffer.reserved
        for group in surplus:
            self._take(group)
        return tuple(sorted(surplus))

    def _pack_late(self, holes: Iterable[Version], floor: Version) -> Version:
        """Fill these EMPTY entries by earlier reservations, highest first; the lowest hole left.

        A reservation that moves leaves a hole in its turn. None moves out of a buffer below
        `floor`.
        """
        todo = set(holes)
        hole = -1
        while todo:
            hole = max(todo)
            earlier = self._earlier_reservation(hole, floor) if self._room(hole) else None
            if earlier is None:
                todo.remove(hole)
                continue
            source, group = earlier
            self._put_reserved(group, self._take(group), hole)
            self._holes.add(source)
            todo.add(source)
        return hole

    def _pack_one_early(self) -> tuple[Version, Version] | None:
        """Move one OCCUPIED group into the lowest hole that can have one: (from, to)."""
        for hole in sorted(self._holes):
            if self._room(hole):
                later = self._later_occupied(hole)
                if later is not None:
                    source = self._place[later]
                    self._put_occupied(later, self._take(later), hole)
                    return source, hole
        return None

    def _earlier_reservation(self, hole: Version, floor: Version) -> tuple[Version, GroupId] | None:
        """What may move later, into `hole`: from the lowest buffer, the one that can wait longest."""
        for number in range(max(floor, hole - self.max_staleness), hole):
            buffer = self._buffers.get(number)
            if buffer is not None and buffer.reserved:
                latest = buffer.latest_reserved()
                if latest is not None and hole <= latest[0] + self.max_staleness:
                    return number, latest[1]
        return None

    def _later_occupied(self, hole: Version) -> GroupId | None:
        """What may move earlier, into `hole`: the OCCUPIED group of the lowest version, then id."""
        best: tuple[Version, GroupId] | None = None
        for number in range(hole + 1, hole + self.max_staleness + 1):
            buffer = self._buffers.get(number)
            if buffer is not None and buffer.occupied:
                oldest = buffer.oldest_occupied()
                if oldest is not None and oldest[0] <= hole and (best is None or oldest < best):
                    best = oldest
        return None if best is None else best[1]

    # -- entries -----------------------------------------------------------------------------

    def _held_place(self, group: GroupId) -> Version:
        place = self._place.get(group)
        if place is None:
            raise ProtocolError(f"group {group} holds no entry")
        return place

    def _reserved_place(self, group: GroupId) -> Version:
        place = self._held_place(group)
        if group not in self._buffers[place].reserved:
            raise ProtocolError(f"group {group} is not reserved")
        return place

    def _room(self, number: Version) -> int:
        buffer = self._buffers.get(number)
        return self._size if buffer is None else buffer.room

    def _highest_empty(self, version: Version) -> Version | None:
        return next((b for b in reversed(self.window(version)) if self._room(b)), None)

    def _take(self, group: GroupId) -> Version:
        """EMPTY the entry that the group holds; its version."""
        buffer = self._buffers[self._place.pop(group)]
        room = buffer.room
        held = buffer.reserved if group in buffer.reserved else buffer.occupied
        version = held.pop(group)
        self._num_empty += buffer.room - room
        return version

    def _put_reserved(self, group: GroupId, version: Version, target: Version) -> None:
        buffer = self._open(group, version, target)
        buffer.put_reserved(group, version)
        self._num_empty -= 1

    def _put_occupied(self, group: GroupId, version: Version, target: Version) -> None:
        buffer = self._open(group, version, target)
        room = buffer.room
        buffer.put_occupied(group, version)
        self._num_empty += buffer.room - room

    def _open(self, group: GroupId, version: Version, target: Version) -> Buffer:
        """The buffer that the group is put into: the one place where the window is checked."""
        assert max(version, self.first) <= target <= version + self.max_staleness, (version, target)
        assert target < self.num_batches
        buffer = self._buffers.get(target)
        if buffer is None:
            buffer = self._buffers[target] = Buffer(self.groups_per_batch, self._size)
        assert buffer.room, f"buffer {target} takes nothing more"
        self._place[group] = target
        return buffer
