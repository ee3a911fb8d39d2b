"""The staleness protocol: which training batch a group of trajectories may end up in.

Theory (StaleFlow, arXiv 2601.12784, section on the consistency protocol; words in
ARCHITECTURE.md). Buffer b collects the batch that the learner consumes at version b; consuming it
makes version b + 1. Its target is `groups_per_batch`, and it has that many entries and
`extra_groups` more, each

    EMPTY --reserve--> RESERVED --occupy--> OCCUPIED --consume--> (gone with its buffer)
                          |                    |
                          +------release-------+--> EMPTY

A group of version v (the least version at which one of its members was started) may hold an entry
of buffer b only if

    v <= b <= v + max_staleness.                                                       (window)

| state of a buffer | OCCUPIED | EMPTY entries | takes |
| --- | --- | --- | --- |
| pending | below target | some | reservations and finished work |
| stuck | below target | none | finished work, where a reservation is given up for it |
| ready | at target | none | nothing |
| ready_with_capacity | at target | some | nothing |

| operation | from | to | entry | then |
| --- | --- | --- | --- | --- |
| reserve | EMPTY | RESERVED | the highest EMPTY one in the window | |
| tighten | RESERVED | RESERVED | its own, or if it must, the highest EMPTY in the window | late |
| occupy | RESERVED | OCCUPIED | its own given up, then late, the lowest EMPTY one | settle |
| release | RESERVED, OCCUPIED | EMPTY | its own: it ended without being trained on | settle |
| consume | OCCUPIED | EMPTY | all of the first buffer, which has met its target | |

| what follows | moves | from | into | which first |
| --- | --- | --- | --- | --- |
| late (backfill) | RESERVED | the lowest buffer | the highest EMPTY entry | newest, highest id |
| early | OCCUPIED | any later buffer | the lowest EMPTY entry | oldest, lowest id |
| surplus | RESERVED | a buffer that has met its target | nothing: returned | |

`reserve` and `tighten` are refused where there is no such entry. Moves stay in the group's window
and are made until there are none; `settle` is late, then early with late after each move, then
surplus. In `occupy`, late takes nothing out of buffers below the group's version until the group
has its entry, since a hole there would be out of the group's reach.

Before generation starts, lengths are unknown. So reservations count on the worst and lie as late as
they can, which leaves the early entries to those that must have them, and finished work lies as
early as it can, which completes the next batch first. After every operation

  - no reservation could move into an EMPTY entry of a later buffer, and
  - after `occupy` and `release`, no finished group could move into one of an earlier buffer.

(`tighten` leaves its hole to the next of those two, which is sure to come since its own group is
RESERVED. It has no way to say that groups have become surplus.) A group never ends later than where
it was reserved. If a finished group is filtered, or a stuck one retried, finished work of later
buffers is in its place at once.

**Surplus.** Of `groups_per_batch + extra_groups` reservations those that finish first make the
batch, and the rest is aborted, as published. Moving the rest to later buffers instead would keep
its tokens; that is what `late` has done already, before the target was met: at that moment no
reservation left in the buffer could lie in any EMPTY entry beyond it. What remains would have to
drive out another group, whose batch would then be waited for, which is what the extra entries are
there to avoid. A batch that has met its target takes nothing more: its spare entries are no room.

**The bound.** A group gets into a buffer, by whatever operation or move, through one function
(`Entries._enter`), which checks the window. Its version changes in `tighten` alone, which lowers it
only where the entry then held lies in the smaller window. So between any two operations each group
of version v in buffer b has v >= b - max_staleness, and with it each batch that is consumed. A
member starts only after `tighten` has allowed it, so no trajectory's version is below its group's:
law 1. Redundancy changes how many entries there are, filtering only takes groups out; neither has a
say in the window. `consume` looks once more.

**No deadlock.** (1) A RESERVED group finds an entry when it finishes. Its buffer b has not met
its target, or it would have been surplus. The entry it gives up stays EMPTY, or is filled by a
reservation out of a buffer from v on that is below b and has not met its target either, and so on:
one EMPTY entry between v and b is left at the end. (2) The first buffer gets complete. While it has
not met its target, one of its entries is RESERVED or EMPTY. If all that are not OCCUPIED are
RESERVED, these groups are running, or wait for nothing but an instance, and land in it when they
finish. If one is EMPTY, it is in the window of the current version, v = first buffer: such groups
are admitted, and those up to max_staleness beyond it are finitely many, until the entry is RESERVED
or one of them has finished, and it goes into the lowest entry. (3) An abort is no step back: groups
become surplus only where a batch is completed. A batch gets incomplete again only by a release, or
by giving finished work to an earlier batch. Releases of finished groups, and of stuck ones, have to
be limited by the caller (`max_filtered`, `max_retries`). A refusal holds nothing.

**Cost.** With the number of buffers in a window a constant, every operation is O(log n) amortised,
and `consume` that for each of its groups: a reservation moves only later, but for `tighten`, which
narrows its window for good; finished work moves only earlier; so each has but max_staleness moves
to make in its life.

`ordered.py` has the same operations for batches in the order of requests.
"""

from __future__ import annotations

from rhymeflow.core.protocol.entries import Entries, ProtocolError
from rhymeflow.core.types import GroupId, Version


class StalenessBuffers(Entries):
    """`Entries` and the operations on them; `ProtocolError` is raised before anything changes."""

    # -- operations --------------------------------------------------------------------------

    def reserve(self, group: GroupId, version: Version) -> Version | None:
        """RESERVE the highest EMPTY entry in the window; None: not admitted (backpressure)."""
        self._check("reserve", group)
        target = self._vacancy(version)
        if target is not None:
            self._enter(group, version, target).reserved.put(group, version)
        return target

    def tighten(self, group: GroupId, version: Version) -> bool:
        """Make room for a member that would start at `version`; False: it may not start there.

        A version that is not below the group's own changes nothing. A lower one becomes the
        group's, if the entry held lies in the smaller window, or else another can be had there.
        """
        self._check("tighten", group)
        place = self._place[group]
        own = self.by_version[place].reserved[group]
        if version >= own:
            return True
        if place <= version + self.max_staleness:
            self.by_version[place].reserved.put(group, version)
            return True
        target = self._vacancy(version)
        if target is None:
            return False
        self._take(group)
        self._enter(group, version, target).reserved.put(group, version)
        self._holes.add(place)
        self._pack_late(place, self.first)
        return True

    def occupy(self, group: GroupId) -> tuple[GroupId, ...]:
        """Turn the group's reservation into the lowest OCCUPIED entry it can have.

        Returns:
            The surplus, in ascending order: groups that were RESERVED in a buffer whose target is
            now met. They hold no entry any more and are to be aborted.
        """
        self._check("occupy", group)
        place = self._place[group]
        version = self._take(group)
        floor = max(version, self.first)
        hole = self._pack_late(place, floor)
        target = next(b for b in range(floor, place + 1) if self._room(b))
        self._enter(group, version, target).occupied.put(group, version)
        # What is below `floor` and could move into the hole would have been in `target`.
        self._holes.add(hole)
        return self._settle({target})

    def release(self, group: GroupId) -> tuple[GroupId, ...]:
        """EMPTY the group's entry: it will not be trained on. Returns the surplus, as `occupy`.

        There can be some: finished work of later buffers moves into the entry, and may complete
        this batch.
        """
        self._check("release", group)
        place = self._place[group]
        self._take(group)
        self._holes.add(place)
        self._pack_late(place, self.first)
        return self._settle(set())

    def consume(self) -> tuple[GroupId, ...]:
        """Take the first buffer, which must be ready; its groups in ascending order.

        The order does not depend on which finished first: at `max_staleness` 0 the batch is the one
        the plain synchronous loop would train on.
        """
        if not self.ready():
            raise ProtocolError(f"buffer {self.first} is not ready")
        groups = self.by_version[self.first].occupied
        for group, version in groups.items():
            self._check("consume", group)
            if version < self.first - self.max_staleness:
                raise ProtocolError(f"group {group} of version {version} in batch {self.first}")
        del self.by_version[self.first]
        for group in groups:
            del self._place[group]
        assert self.first not in self._holes, "what completed it has settled the moves"
        self.first += 1
        return tuple(sorted(groups))

    # -- which entry ------------------------------------------------------------------------------

    def _vacancy(self, version: Version) -> Version | None:
        """Return the buffer that a reservation of this version gets; None: none has room."""
        return self._highest_empty(version)

    # -- the two packings --------------------------------------------------------------------

    def _settle(self, filled: set[Version]) -> tuple[GroupId, ...]:
        """Pack finished work early until nothing moves, once reservations lie late; return the
        surplus of the `filled` buffers and of those it fills."""
        while (moved := self._pack_one_early()) is not None:
            source, target = moved
            filled.add(target)
            self._holes.add(source)
            self._pack_late(source, self.first)
        self._holes.clear()
        buffers = (self.by_version[number] for number in filled)
        surplus = [group for buffer in buffers if buffer.met for group in buffer.reserved]
        for group in surplus:
            self._take(group)
        return tuple(sorted(surplus))

    def _pack_late(self, hole: Version, floor: Version) -> Version:
        """Fill this buffer's EMPTY entries with earlier reservations; return where a hole is left.

        A reservation that moves leaves a hole in its turn; the highest is filled first. None moves
        out of a buffer below `floor`.
        """
        todo = {hole}
        while todo:
            hole = max(todo)
            earlier = self._earlier_reservation(hole, floor) if self._room(hole) else None
            if earlier is None:
                todo.remove(hole)
                continue
            source, group = earlier
            self._move(group, hole)
            self._holes.add(source)
            todo.add(source)
        return hole

    def _pack_one_early(self) -> tuple[Version, Version] | None:
        """Move one group into the lowest hole that can have one, and return (from, to)."""
        for hole in sorted(self._holes):
            if self._room(hole):
                later = self._from_later(hole)
                if later is not None:
                    return self._move(later, hole), hole
        return None

    def _earlier_reservation(self, hole: Version, floor: Version) -> tuple[Version, GroupId] | None:
        """Return (buffer, group) of a reservation that may move later, into `hole`."""
        for number in range(max(floor, hole - self.max_staleness), hole):
            buffer = self.by_version.get(number)
            if buffer is not None and buffer.reserved:
                latest = buffer.reserved.first()
                if latest is not None and hole <= latest[0] + self.max_staleness:
                    return number, latest[1]
        return None

    def _from_later(self, hole: Version) -> GroupId | None:
        """Return the OCCUPIED group that may move earlier, into `hole`: lowest version, then id."""
        best: tuple[Version, GroupId] | None = None
        for number in range(hole + 1, hole + self.max_staleness + 1):
            buffer = self.by_version.get(number)
            if buffer is not None and buffer.occupied:
                oldest = buffer.occupied.first()
                if oldest is not None and oldest[0] <= hole and (best is None or oldest < best):
                    best = oldest
        return None if best is None else best[1]
