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

from dataclasses import dataclass, field

from rhymeflow.core.types import GroupId, Version


class ProtocolError(AssertionError):
    """An operation that the protocol does not allow: a defect in the caller, never bad luck."""


@dataclass(slots=True)
class Buffer:
    """The book of one training batch: group -> version, by state; the rest of it is EMPTY."""

    reserved: dict[GroupId, Version] = field(default_factory=dict)
    occupied: dict[GroupId, Version] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.reserved) + len(self.occupied)


class StalenessBuffers:
    """The books of all batches that are not consumed yet.

    Args:
        groups_per_batch: entries of each buffer.
        max_staleness: the bound, in versions.
        num_batches: buffers 0 .. num_batches - 1 exist; beyond them nothing is admitted, so that
            the run ends with nothing left over.
    """

    def __init__(self, *, groups_per_batch: int, max_staleness: int, num_batches: int) -> None:
        assert groups_per_batch > 0
        assert max_staleness >= 0
        self.groups_per_batch = groups_per_batch
        self.max_staleness = max_staleness
        self.num_batches = num_batches
        self.first: Version = 0
        self._buffers: dict[Version, Buffer] = {}
        self._place: dict[GroupId, Version] = {}

    # -- questions ---------------------------------------------------------------------------

    def window(self, version: Version) -> range:
        """Buffers, lowest first, that a group of this version may sit in."""
        end = min(version + self.max_staleness, self.num_batches - 1)
        return range(max(version, self.first), end + 1)

    def admissible(self, version: Version) -> bool:
        """Whether a new group started at `version` would find an entry."""
        return self._highest_empty(version) is not None

    def place(self, group: GroupId) -> Version | None:
        """The buffer the group holds an entry of."""
        return self._place.get(group)

    def version(self, group: GroupId) -> Version:
        """The group's version."""
        buffer = self._buffer_of(group)
        return buffer.reserved[group] if group in buffer.reserved else buffer.occupied[group]

    def ready(self) -> bool:
        """Whether the first buffer is all OCCUPIED."""
        buffer = self._buffers.get(self.first)
        return buffer is not None and len(buffer.occupied) == self.groups_per_batch

    def books(self) -> dict[Version, Buffer]:
        """The buffers that hold anything, by number. To look at, not to change."""
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

        A version that is not below the group's own changes nothing. A lower one lowers the group's,
        if the entry held, or else another EMPTY one, lies in the smaller window.
        """
        place = self._reserved_place(group)
        own = self._buffers[place].reserved[group]
        if version >= own:
            return True
        if place > version + self.max_staleness:
            earlier = self._highest_empty(version)
            if earlier is None:
                return False
            del self._buffers[place].reserved[group]
            place = earlier
        self._put_reserved(group, version, place)
        return True

    def occupy(self, group: GroupId) -> Version:
        """Turn the group's reservation into the lowest OCCUPIED entry it can have."""
        hole = self._reserved_place(group)
        version = self._buffers[hole].reserved.pop(group)
        target = self._lowest_reachable(version, hole)
        buffer = self._buffer(target)
        if len(buffer) == self.groups_per_batch:  # full: move a reservation later, into the hole
            moved = self._movable(buffer, hole)
            assert moved is not None
            self._put_reserved(moved, buffer.reserved.pop(moved), hole)
        buffer.occupied[group] = version
        self._place[group] = target
        return target

    def release(self, group: GroupId) -> None:
        """EMPTY the group's entry: it will not be trained on."""
        buffer = self._buffer_of(group)
        buffer.reserved.pop(group, None)
        buffer.occupied.pop(group, None)
        del self._place[group]

    def consume(self) -> tuple[GroupId, ...]:
        """Take the first buffer, which must be ready; its groups in ascending order.

        The order does not depend on who finished first: at `max_staleness` 0 the batch is the one
        the plain synchronous loop would train on.
        """
        if not self.ready():
            raise ProtocolError(f"buffer {self.first} is not ready")
        groups = self._buffers.pop(self.first).occupied
        for group, version in groups.items():
            if version < self.first - self.max_staleness:
                raise ProtocolError(f"group {group} of version {version} in batch {self.first}")
            del self._place[group]
        self.first += 1
        return tuple(sorted(groups))

    # -- inside ------------------------------------------------------------------------------

    def _buffer(self, number: Version) -> Buffer:
        return self._buffers.setdefault(number, Buffer())

    def _buffer_of(self, group: GroupId) -> Buffer:
        if group not in self._place:
            raise ProtocolError(f"group {group} holds no entry")
        return self._buffers[self._place[group]]

    def _reserved_place(self, group: GroupId) -> Version:
        if group not in self._buffer_of(group).reserved:
            raise ProtocolError(f"group {group} is not reserved")
        return self._place[group]

    def _put_reserved(self, group: GroupId, version: Version, target: Version) -> None:
        assert target in self.window(version), (group, version, target)
        self._buffer(target).reserved[group] = version
        self._place[group] = target

    def _has_empty(self, number: Version) -> bool:
        buffer = self._buffers.get(number)
        return buffer is None or len(buffer) < self.groups_per_batch

    def _highest_empty(self, version: Version) -> Version | None:
        return next((b for b in reversed(self.window(version)) if self._has_empty(b)), None)

    def _lowest_reachable(self, version: Version, hole: Version) -> Version:
        for number in range(max(version, self.first), hole):
            if self._has_empty(number) or self._movable(self._buffers[number], hole) is not None:
                return number
        return hole

    def _movable(self, buffer: Buffer, hole: Version) -> GroupId | None:
        """The reservation that may move to `hole` and can wait longest (then: drawn last)."""
        able = [(v, g) for g, v in buffer.reserved.items() if hole in self.window(v)]
        return max(able)[1] if able else None
