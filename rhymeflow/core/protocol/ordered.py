"""The staleness protocol with batches in the order of requests, not of endings.

The bound, the states and the operations are those of `staleness.py`. What differs is which entry:

| operation | entry |
| --- | --- |
| reserve | RESERVED | the lowest EMPTY one in the window |
| tighten | its own, or if it must, the lowest EMPTY one in the smaller window |
| occupy | its own |
| release | its own; of later groups the one of the lowest id moves into it, and so on |

"Later" is in a later buffer, RESERVED or OCCUPIED, if its window has the entry.

After every operation but `tighten` no group could move into an EMPTY entry of an
earlier buffer. So, where groups are admitted in the order of their ids and at versions that are not
ahead of the first buffer, they lie in the buffers in that order, and each batch has the first
groups that are left, whichever finish first. What finishes first is shorter than the rest: batches
in the order of endings begin with short responses and have the long ones together later
(docs/lab-log.md). The price is that a batch waits for its slowest group though a later one is
complete. Which groups of one batch are surplus is still a matter of which finish first.

**The bound** is kept as there: by `_enter`, which all entries go through.

**No deadlock.** A RESERVED group has its own entry to finish in. While the first buffer has not met
its target, an entry of it that is not OCCUPIED is RESERVED, by a group that runs or waits for an
instance alone, or EMPTY; then no group of a later buffer could have it, so those there are begin
after it, and the next that is admitted takes it before any other.
"""

from __future__ import annotations

from rhymeflow.core.protocol.staleness import StalenessBuffers
from rhymeflow.core.types import GroupId, Version


class OrderedBuffers(StalenessBuffers):
    """`StalenessBuffers` whose batches do not depend on what finishes first."""

    def tighten(self, group: GroupId, version: Version) -> bool:
        """As there. A group that stays may have got EMPTY entries of earlier buffers in reach."""
        self._check("tighten", group)
        reach = range(max(version, self.first), self.version(group))
        if not super().tighten(group, version):
            return False
        self._holes.update(number for number in reach if self._room(number))
        return True

    def _vacancy(self, version: Version) -> Version | None:
        return next((number for number in self.window(version) if self._room(number)), None)

    def _pack_late(self, hole: Version, floor: Version) -> Version:
        return hole  # a reservation lies where its batch is

    def _from_later(self, hole: Version) -> GroupId | None:
        """What may move earlier, into `hole`: of all groups the one of the lowest id."""
        later = (
            group
            for number in range(hole + 1, hole + self.max_staleness + 1)
            if (buffer := self.by_version.get(number)) is not None
            for held in (buffer.reserved, buffer.occupied)
            for group, version in held.items()
            if version <= hole
        )
        return min(later, default=None)
