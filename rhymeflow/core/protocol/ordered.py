"""The staleness protocol with batches in the order of requests instead of completions.

The bound, the states and the operations are those of `staleness.py`. The entries differ:

| operation | entry |
| --- | --- |
| reserve | the lowest EMPTY one in the window |
| tighten | its own, or if that is outside the smaller window, the lowest EMPTY one there |
| occupy | its own |
| release | its own becomes EMPTY; the later group of the lowest id moves into it, and so on |

A later group is RESERVED or OCCUPIED in a later buffer, and its window contains the entry.

After every operation but `tighten`, no group could move into an EMPTY entry of an earlier buffer.
So if groups are admitted in the order of their ids, at versions not ahead of the first buffer, they
lie in the buffers in that order, and each batch has the first groups that are left, in whatever
order they finish. Short responses finish first: batches in the order of completions begin with
short responses and have the long ones together later (docs/lab-log.md). The price is that a batch
waits for its slowest group even if a later batch is complete. Which groups of a batch are surplus
still depends on which finish first.

**The bound** holds as in `staleness.py`: by `_enter`, which checks every entry.

**No deadlock.** A RESERVED group can finish in its own entry. While the first buffer has not met
its target, each of its entries that is not OCCUPIED is RESERVED, by a group that runs or only waits
for an instance, or EMPTY. An EMPTY one cannot be taken by a group of a later buffer, so all of
those begin after it, and the next group that is admitted takes it first."""

from __future__ import annotations

from rhymeflow.core.protocol.staleness import StalenessBuffers
from rhymeflow.core.types import GroupId, Version


class OrderedBuffers(StalenessBuffers):
    """`StalenessBuffers` whose batches do not depend on which groups finish first."""

    def tighten(self, group: GroupId, version: Version) -> bool:
        """Lower the group's version, which adds earlier buffers to its window: note their holes."""
        self._check("tighten", group)
        added = range(max(version, self.first), self.version(group))
        if not super().tighten(group, version):
            return False
        self._holes.update(number for number in added if self._room(number))
        return True

    def _vacancy(self, version: Version) -> Version | None:
        return next((number for number in self.window(version) if self._room(number)), None)

    def _pack_late(self, hole: Version, floor: Version) -> Version:
        return hole  # a reservation lies where its batch is

    def _from_later(self, hole: Version) -> GroupId | None:
        """Return the group of the lowest id that may move earlier, into `hole`; None: none may."""
        later = (
            group
            for number in range(hole + 1, hole + self.max_staleness + 1)
            if (buffer := self.by_version.get(number)) is not None
            for held in (buffer.reserved, buffer.occupied)
            for group, version in held.items()
            if version <= hole
        )
        return min(later, default=None)
