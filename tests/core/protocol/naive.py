"""The staleness protocol said once more, as slowly and plainly as can be: an oracle.

One list of rows, no look-up, no heap, no counter, nothing remembered between operations: each rule
lists all that it allows and takes the first, as the tables in `core/protocol/staleness.py` say.
`best_placement` knows no rules at all: it tries every placement there is."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from rhymeflow.core.protocol.staleness import ProtocolError


@dataclass
class Row:
    """A group that holds an entry."""

    group: int
    version: int
    state: str
    place: int


class NaiveBuffers:
    """What `StalenessBuffers` does, by brute force."""

    def __init__(self, *, groups_per_batch, extra_groups, max_staleness, num_batches):
        self.target, self.extra = groups_per_batch, extra_groups
        self.eta, self.num_batches = max_staleness, num_batches
        self.first = 0
        self.rows: list[Row] = []

    # -- questions -------------------------------------------------------------------------

    def rows_of(self, buffer: int, state: str) -> list[Row]:
        return [r for r in self.rows if r.place == buffer and r.state == state]

    def met(self, buffer: int) -> bool:
        return len(self.rows_of(buffer, "occupied")) >= self.target

    def empty(self, buffer: int) -> int:
        """Entries that can be taken."""
        if not self.first <= buffer < self.num_batches or self.met(buffer):
            return 0
        return self.target + self.extra - len([r for r in self.rows if r.place == buffer])

    def buffers(self) -> range:
        return range(self.first, self.num_batches)

    def fits(self, version: int, buffer: int) -> bool:
        return version <= buffer <= version + self.eta

    def row(self, group: int) -> Row:
        for row in self.rows:
            if row.group == group:
                return row
        raise ProtocolError(group)

    def state(self, buffer: int) -> str:
        if not self.met(buffer):
            return "pending" if self.empty(buffer) else "stuck"
        return "ready_with_capacity" if self.extra else "ready"

    def ready(self) -> bool:
        return self.met(self.first)

    def num_empty(self) -> int:
        return sum(self.empty(b) for b in self.buffers())

    def admissible(self, version: int) -> bool:
        return any(self.fits(version, b) and self.empty(b) for b in self.buffers())

    # -- operations ------------------------------------------------------------------------

    def reserve(self, group: int, version: int) -> int | None:
        if any(r.group == group for r in self.rows):
            raise ProtocolError(group)
        able = [b for b in self.buffers() if self.fits(version, b) and self.empty(b)]
        if not able:
            return None
        self.rows.append(Row(group, version, "reserved", self.choice(able)))
        return self.choice(able)

    def tighten(self, group: int, version: int) -> bool:
        row = self.reserved_row(group)
        if version >= row.version:
            return True
        able = [b for b in self.buffers() if self.fits(version, b) and self.empty(b)]
        if self.fits(version, row.place):
            able = [row.place]
        if not able:
            return False
        row.version, row.place = version, self.choice(able)
        self.late(0)
        return True

    def occupy(self, group: int) -> tuple[int, ...]:
        row = self.reserved_row(group)
        self.rows.remove(row)
        self.late(row.version)
        able = [b for b in self.buffers() if self.fits(row.version, b) and self.empty(b)]
        self.rows.append(Row(group, row.version, "occupied", min(able)))
        return self.settle()

    def release(self, group: int) -> tuple[int, ...]:
        self.rows.remove(self.row(group))
        return self.settle()

    def consume(self) -> tuple[int, ...]:
        if not self.ready():
            raise ProtocolError(self.first)
        groups = sorted(r.group for r in self.rows if r.place == self.first)
        self.rows = [r for r in self.rows if r.place != self.first]
        self.first += 1
        return tuple(groups)

    def choice(self, able: list[int]) -> int:
        """Where a reservation lies."""
        return max(able)

    # -- what follows ----------------------------------------------------------------------

    def reserved_row(self, group: int) -> Row:
        row = self.row(group)
        if row.state != "reserved":
            raise ProtocolError(group)
        return row

    def moves(self, state: str) -> Iterator[tuple[Row, int]]:
        """Each group of this state, with each EMPTY entry elsewhere in its window."""
        empty = [b for b in self.buffers() if self.empty(b)]
        for row in self.rows:
            if row.state == state:
                for buffer in empty:
                    if buffer != row.place and self.fits(row.version, buffer):
                        yield row, buffer

    def late(self, floor: int) -> None:
        def rank(move):
            row, to = move
            return to, -row.place, row.version, row.group

        while able := [(r, b) for r, b in self.moves("reserved") if b > r.place >= floor]:
            row, to = max(able, key=rank)
            row.place = to

    def early(self) -> bool:
        def rank(move):
            row, to = move
            return to, row.version, row.group

        able = [(r, b) for r, b in self.moves("occupied") if b < r.place]
        if able:
            row, to = min(able, key=rank)
            row.place = to
        return bool(able)

    def settle(self) -> tuple[int, ...]:
        self.late(0)
        while self.early():
            self.late(0)
        surplus = [r for r in self.rows if r.state == "reserved" and self.met(r.place)]
        self.rows = [r for r in self.rows if r not in surplus]
        return tuple(sorted(r.group for r in surplus))


class NaiveOrdered(NaiveBuffers):
    """What `OrderedBuffers` does, by the table in `core/protocol/ordered.py`."""

    def choice(self, able: list[int]) -> int:
        return min(able)

    def late(self, floor: int) -> None:
        pass

    def early(self) -> bool:
        able = [
            (b, r.group) for s in ("reserved", "occupied") for r, b in self.moves(s) if b < r.place
        ]
        if able:
            to, group = min(able)
            self.row(group).place = to
        return bool(able)


def best_placement(rows, *, target, size, eta, first, num_batches) -> list[int]:
    """Finished groups in each buffer, from the first on, if they lay as early as is possible. Over
    every placement of these groups in their windows that leaves each its entry: at most `target`
    OCCUPIED and `size` entries a buffer, and none RESERVED where the target is met."""
    end = min(max(row.version for row in rows) + eta + 1, num_batches)
    windows = [range(max(row.version, first), min(row.version + eta + 1, end)) for row in rows]
    best: list[int] = []
    for places in product(*windows):
        occupied, reserved = [0] * (end - first), [0] * (end - first)
        for row, place in zip(rows, places, strict=True):
            (occupied if row.state == "occupied" else reserved)[place - first] += 1
        allowed = all(
            (o < target and o + r <= size) or (o == target and not r)
            for o, r in zip(occupied, reserved, strict=True)
        )
        if allowed:
            best = max(best, occupied)
    return best
