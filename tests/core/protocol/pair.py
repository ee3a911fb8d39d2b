"""The fast protocol and the naive one side by side, and what must hold of both at any time."""

from collections import Counter

from rhymeflow.core.protocol.ordered import OrderedBuffers
from rhymeflow.core.protocol.staleness import ProtocolError, StalenessBuffers
from tests.core.invariants import check_buffers
from tests.core.protocol.naive import NaiveBuffers, NaiveOrdered, Row


class Pair:
    """Carries out each operation on both, compares what comes of it, and checks the laws."""

    def __init__(self, *, is_ordered: bool = False, **sizes: int) -> None:
        self.is_ordered = is_ordered
        self.fast = (OrderedBuffers if is_ordered else StalenessBuffers)(**sizes)
        self.slow = (NaiveOrdered if is_ordered else NaiveBuffers)(**sizes)
        self.ended: list[int] = []  # groups that hold no entry any more
        self.group_id = 0  # the next new group
        self.settled = True  # whether nothing but `tighten` can have left finished work waiting

    @property
    def rows(self) -> list[Row]:
        return self.slow.rows

    def held(self, state: str | None = None) -> list[int]:
        return [r.group for r in self.rows if state in (None, r.state)]

    def do(self, operation: str, *arguments: int):
        """The operation's result, the same on both sides; None where it is refused by both."""
        before = rows_of(self.fast)
        results = []
        for side in (self.fast, self.slow):
            try:
                results.append(("result", getattr(side, operation)(*arguments)))
            except ProtocolError:
                results.append(("refused", None))
        assert results[0] == results[1], f"{operation}{arguments}: {results}"
        outcome, result = results[0]
        if outcome == "refused" or result is None or result is False:
            assert rows_of(self.fast) == before, f"{operation}{arguments} changed something"
        else:
            self._after(operation, arguments, result, before)
        self.check(operation)
        return result

    def _after(self, operation, arguments, result, before) -> None:
        if operation in ("occupy", "release", "consume"):
            self.ended += result
        if operation == "release":
            self.ended.append(arguments[0])
        if operation == "occupy":
            (place,) = (row[3] for row in before if row[0] == arguments[0])
            assert self.fast.place(arguments[0]) <= place, "later than where it was reserved"
        if operation == "consume":
            assert len(result) == self.fast.groups_per_batch
        if operation in ("occupy", "release"):
            self.settled = True
        elif operation == "tighten":
            self.settled = False

    def check(self, operation: str) -> None:
        """Equal entries, and the laws."""
        rows = rows_of(self.fast)
        assert rows == sorted((r.group, r.version, r.state, r.place) for r in self.rows), operation
        check_laws(self.fast, rows, self.settled, self.is_ordered)
        fast, slow = self.fast, self.slow
        assert fast.num_empty() == slow.num_empty()
        assert fast.ready() == slow.ready()
        end = min(fast.first + fast.max_staleness + 2, fast.num_batches)
        for number in range(fast.first, end):
            assert fast.state(number) == slow.state(number)
            reserved = tuple(g for g, _, state, b in rows if b == number and state == "reserved")
            assert fast.reserved_in(number) == reserved
        for version in range(max(0, fast.first - fast.max_staleness - 1), end):
            assert fast.admissible(version) == slow.admissible(version)


def rows_of(fast: StalenessBuffers) -> list[tuple[int, int, str, int]]:
    """(group, version, state, buffer) of all groups that hold an entry, by group."""
    rows = []
    for number, buffer in fast.by_version.items():
        rows += [(g, v, "reserved", number) for g, v in buffer.reserved.items()]
        rows += [(g, v, "occupied", number) for g, v in buffer.occupied.items()]
    return sorted(rows)


def check_laws(fast: StalenessBuffers, rows, settled: bool, is_ordered: bool = False) -> None:
    """The laws on the entries alone, whatever rules led there."""
    check_buffers(fast)
    eta, size = fast.max_staleness, fast.groups_per_batch + fast.extra_groups
    held = Counter(number for *_, number in rows)
    occupied = Counter(number for *_, state, number in rows if state == "occupied")
    for group, version, state, number in rows:
        assert fast.version(group) == version
        for other in range(max(fast.first, version), min(version + eta + 1, fast.num_batches)):
            room = occupied[other] < fast.groups_per_batch and held[other] < size
            if state == "reserved" and not is_ordered:
                assert not (room and other > number), "a reservation could be later"
            elif settled:
                assert not (room and other < number), "it could be earlier"
    first = fast.first
    is_there = first < fast.num_batches and not fast.ready()
    assert not is_there or fast.reserved_in(first) or fast.admissible(first), "it is never complete"
