"""The protocol alone: random interleavings of every operation, and its rules one by one."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rhymeflow.core.invariants import check_buffers
from rhymeflow.core.staleness import ProtocolError, StalenessBuffers


def buffers(groups_per_batch=2, max_staleness=1, num_batches=100) -> StalenessBuffers:
    return StalenessBuffers(
        groups_per_batch=groups_per_batch,
        extra_groups=0,
        max_staleness=max_staleness,
        num_batches=num_batches,
    )


def test_reserve_takes_the_highest_and_then_refuses():
    books = buffers()
    assert [books.reserve(g, 0) for g in range(5)] == [1, 1, 0, 0, None]
    assert not books.admissible(0)
    assert books.admissible(1)


def test_occupy_takes_the_lowest_even_if_reserved_late():
    books = buffers()
    books.reserve(0, 0)
    books.occupy(0)
    assert books.place(0) == 0


def test_backfill_moves_a_younger_reservation_out_of_the_way():
    books = buffers(groups_per_batch=1, max_staleness=1)
    assert books.reserve(0, 0) == 1
    assert books.reserve(1, 0) == 0
    books.occupy(0)
    assert books.place(0) == 0, "0 has finished first and takes the first batch"
    assert books.place(1) == 1, "1 moved into the hole that 0 gave up"
    assert books.ready()
    assert books.consume() == (0,)


def test_a_reservation_that_cannot_wait_is_not_moved():
    books = buffers(groups_per_batch=1, max_staleness=2)
    books.reserve(0, 0)
    books.reserve(1, 0)
    books.reserve(2, 0)  # buffers 2, 1, 0
    books.occupy(2)
    books.consume()
    books.occupy(1)
    books.consume()
    assert books.reserve(3, 2) == 4
    books.occupy(3)
    assert books.place(3) == 3
    assert books.place(0) == 2, "group 0 of version 0 may not be later than buffer 2"


def test_tighten_moves_the_reservation_earlier_or_refuses():
    books = buffers(groups_per_batch=1, max_staleness=1)
    assert books.reserve(0, 1) == 2
    assert books.tighten(0, 1)
    assert books.tighten(0, 0)
    assert books.place(0) == 1
    assert books.version(0) == 0
    assert books.reserve(1, 1) == 2
    assert books.reserve(2, 0) == 0
    assert not books.tighten(1, 0), "no room left in 0..1"
    assert books.version(1) == 1


def test_nothing_is_admitted_beyond_the_last_batch():
    books = buffers(groups_per_batch=1, max_staleness=5, num_batches=2)
    assert [books.reserve(g, 0) for g in range(3)] == [1, 0, None]


def test_consume_gives_groups_in_ascending_order():
    books = buffers(groups_per_batch=3, max_staleness=0)
    for g in (2, 0, 1):
        books.reserve(g, 0)
    for g in (1, 2, 0):
        books.occupy(g)
    assert books.consume() == (0, 1, 2)
    assert books.first == 1


@pytest.mark.parametrize(
    "operation",
    [
        lambda b: b.consume(),
        lambda b: b.reserve(0, 0),
        lambda b: b.occupy(9),
        lambda b: b.release(9),
        lambda b: (b.occupy(0), b.occupy(0)),
        lambda b: (b.occupy(0), b.tighten(0, 0)),
    ],
)
def test_what_the_protocol_does_not_allow_is_refused(operation):
    books = buffers()
    books.reserve(0, 0)
    with pytest.raises(ProtocolError):
        operation(books)


class Protocol(RuleBasedStateMachine):
    """Every operation in any order, versions running ahead, invariants after each."""

    @initialize(size=st.integers(1, 4), bound=st.integers(0, 3))
    def start(self, size, bound):
        self.books = buffers(size, bound, num_batches=40)
        self.reserved: list[int] = []
        self.reserved_at: dict[int, int] = {}
        self.serial = 0

    @rule(age=st.integers(0, 4))
    def reserve(self, age):
        version = max(0, self.books.first - age)
        could = self.books.admissible(version)
        place = self.books.reserve(self.serial, version)
        assert (place is not None) == could
        if place is not None:
            self.reserved.append(self.serial)
        self.serial += 1

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), age=st.integers(0, 4))
    def tighten(self, data, age):
        group = data.draw(st.sampled_from(self.reserved))
        before = self.books.place(group), self.books.version(group)
        if not self.books.tighten(group, max(0, self.books.first - age)):
            assert before == (self.books.place(group), self.books.version(group))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def occupy(self, data):
        group = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        reserved_at = self.books.place(group)
        self.books.occupy(group)
        assert self.books.place(group) <= reserved_at, "never later than where it was reserved"

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def release(self, data):
        group = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        self.books.release(group)
        assert self.books.place(group) is None

    @precondition(lambda self: self.books.ready())
    @rule()
    def consume(self):
        first, bound = self.books.first, self.books.max_staleness
        versions = list(self.books.books()[first].occupied.values())
        assert len(self.books.consume()) == self.books.groups_per_batch
        assert all(version >= first - bound for version in versions)

    @invariant()
    def holds(self):
        check_buffers(self.books)

    @invariant()
    def some_current_group_can_always_fill_the_first_buffer(self):
        buffer = self.books.books().get(self.books.first)
        full = buffer is not None and len(buffer) == self.books.groups_per_batch
        assert full or self.books.admissible(self.books.first)


Protocol.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestProtocol = Protocol.TestCase
