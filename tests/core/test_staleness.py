"""The protocol alone: its rules one by one, and random interleavings against the naive model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rhymeflow.core.staleness import ProtocolError, StalenessBuffers
from tests.core.naive import Row, best_placement
from tests.core.pair import Pair, rows_of


def buffers(
    groups_per_batch=2, max_staleness=1, num_batches=100, extra_groups=0
) -> StalenessBuffers:
    return StalenessBuffers(
        groups_per_batch=groups_per_batch,
        extra_groups=extra_groups,
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


def test_release_fills_the_hole_with_finished_work_and_so_on():
    books = buffers(groups_per_batch=1, max_staleness=2)
    for g in range(3):
        books.reserve(g, 0)  # buffers 2, 1, 0
    for g in (2, 1, 0):
        books.occupy(g)
    assert [books.place(g) for g in range(3)] == [2, 1, 0]
    assert books.release(2) == ()
    assert [books.place(g) for g in range(3)] == [0, 1, None], "the lowest serial goes first"
    assert books.ready()
    books.release(0)
    assert books.place(1) == 0


def test_a_hole_takes_the_oldest_finished_group_first():
    books = buffers(groups_per_batch=1, max_staleness=2)
    books.reserve(0, 1)  # buffer 3
    books.reserve(1, 0)  # 2
    books.reserve(2, 0)  # 1
    books.reserve(3, 0)  # 0
    for g in (3, 2, 0, 1):
        books.occupy(g)
    assert [books.place(g) for g in range(4)] == [3, 2, 1, 0]
    books.release(2)
    assert books.place(1) == 1


def test_a_hole_takes_nothing_its_window_does_not_admit():
    books = buffers(groups_per_batch=1, max_staleness=1)
    books.reserve(0, 0)
    books.reserve(1, 0)
    books.occupy(0)
    books.reserve(2, 1)
    books.occupy(2)
    assert (books.place(0), books.place(1), books.place(2)) == (0, 1, 2)
    books.release(0)
    assert books.place(2) == 2, "a group of version 1 has no business in batch 0"
    assert not books.ready()


def test_who_is_still_reserved_when_the_target_is_met_is_surplus():
    books = buffers(groups_per_batch=2, extra_groups=2, max_staleness=0)
    assert [books.reserve(g, 0) for g in range(5)] == [0, 0, 0, 0, None]
    assert books.state(0) == "stuck"
    assert books.occupy(2) == ()
    assert books.reserved_in(0) == (0, 1, 3)
    assert books.occupy(0) == (1, 3)
    assert books.place(1) is None
    assert books.state(0) == "ready_with_capacity"
    assert books.reserve(4, 0) is None, "spare entries of a complete batch are no room"
    assert books.consume() == (0, 2)


def test_a_reservation_that_can_wait_is_no_surplus():
    books = buffers(groups_per_batch=1, extra_groups=1, max_staleness=1)
    assert [books.reserve(g, 0) for g in range(4)] == [1, 1, 0, 0]
    assert books.occupy(0) == (2,), "3 moved into the entry that 0 gave up; 2 found none"
    assert books.place(3) == 1


def test_a_release_too_can_complete_a_batch():
    books = buffers(groups_per_batch=1, extra_groups=1, max_staleness=1)
    assert [books.reserve(g, 0) for g in range(4)] == [1, 1, 0, 0]
    books.occupy(0)
    books.occupy(1)
    assert (books.place(0), books.place(1), books.place(3)) == (0, 1, None)
    assert books.reserve(4, 0) is None
    books.release(0)
    assert books.place(1) == 0, "finished work of batch 1 is in its place at once"
    assert books.ready()
    assert books.state(1) == "pending", "and batch 1 has room again"
    assert books.reserve(4, 0) == 1


def test_a_batch_that_is_complete_again_has_surplus_again():
    books = buffers(groups_per_batch=1, extra_groups=1, max_staleness=1)
    for g in range(4):
        books.reserve(g, 0)
    books.occupy(0)
    books.occupy(1)  # batches 0 and 1 are complete
    books.reserve(4, 1)  # 2
    books.reserve(5, 1)  # 2
    books.occupy(4)
    assert books.place(4) == 2
    assert books.release(1) == (), "4 takes its place in batch 1"
    assert books.place(4) == 1
    assert books.reserve(6, 0) is None
    assert books.release(0) == ()
    assert books.reserve(6, 0) == 0
    assert books.reserve(7, 0) == 0
    assert books.occupy(7) == (6,)


def test_states():
    books = buffers(groups_per_batch=1, max_staleness=0)
    assert books.state(0) == "pending"
    books.reserve(0, 0)
    assert books.state(0) == "stuck"
    books.occupy(0)
    assert books.state(0) == "ready"
    books.consume()
    with pytest.raises(ProtocolError):
        books.state(0)


def test_a_member_behind_its_siblings_makes_its_group_move_and_what_it_leaves_is_filled():
    books = buffers(groups_per_batch=1, max_staleness=2)
    assert books.reserve(0, 1) == 3
    assert books.reserve(1, 0) == 2
    assert books.reserve(2, 1) == 1
    assert books.tighten(0, 0)
    assert books.place(2) == 3, "moved later, from 1 into the entry that 0 left"
    assert books.place(0) == 1, "and 0, which had got entry 0, into the one that 2 left"


def tightened() -> StalenessBuffers:
    """1 has finished in buffer 4, of a version ahead of the first buffer; 2 has left buffer 3."""
    books = buffers(groups_per_batch=1, max_staleness=2)
    books.reserve(0, 0)
    books.occupy(0)
    books.consume()
    assert books.reserve(1, 2) == 4
    assert books.reserve(2, 1) == 3
    assert books.reserve(3, 0) == 2
    books.occupy(1)
    assert books.place(1) == 4, "2 and 3 have their last entries"
    assert books.tighten(2, 0)
    assert books.place(2) == 1
    return books


def test_finished_work_takes_the_hole_of_a_tightened_group_at_the_next_settling():
    books = tightened()
    books.release(2)
    assert books.place(1) == 3


def test_a_reservation_takes_the_entry_that_finished_work_gives_up():
    books = tightened()
    assert books.reserve(4, 2) == 3
    books.release(2)
    books.release(3)
    assert books.place(1) == 2
    assert books.place(4) == 4


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("consume", ()),
        ("reserve", (0, 0)),
        ("reserve", (1, 0)),
        ("occupy", (1,)),
        ("tighten", (1, 0)),
        ("occupy", (9,)),
        ("release", (9,)),
        ("tighten", (9, 0)),
        ("version", (9,)),
        ("state", (-1,)),
        ("state", (100,)),
    ],
)
def test_what_the_protocol_does_not_allow_is_refused_and_changes_nothing(operation, arguments):
    books = buffers()
    books.reserve(0, 0)
    books.reserve(1, 0)
    books.occupy(1)
    before = rows_of(books)
    with pytest.raises(ProtocolError):
        getattr(books, operation)(*arguments)
    assert rows_of(books) == before


def test_stale_look_ups_do_not_pile_up():
    books = buffers(groups_per_batch=4, max_staleness=0)
    for g in range(10_000):
        books.reserve(g, 0)
        if g % 2:
            books.occupy(g)
        books.release(g)
    (buffer,) = books.books().values()
    assert len(buffer._latest) + len(buffer._oldest) < 100


class Protocol(RuleBasedStateMachine):
    """Every operation in any order, both sides compared and the laws checked after each.

    Versions run from behind every window to beyond the first buffer. Any operation is also tried
    on groups that hold no entry, or one of another kind, as late and repeated facts would have it.
    """

    @initialize(
        size=st.integers(1, 4),
        extra=st.integers(0, 3),
        eta=st.integers(0, 4),
        num_batches=st.integers(1, 12),
    )
    def start(self, size, extra, eta, num_batches):
        self.pair = Pair(
            groups_per_batch=size, extra_groups=extra, max_staleness=eta, num_batches=num_batches
        )

    def version(self, age: int) -> int:
        return max(0, self.pair.fast.first - age)

    @rule(age=st.integers(-2, 5), count=st.integers(1, 4))
    def reserve(self, age, count):
        for _ in range(count):
            self.pair.do("reserve", self.pair.serial, self.version(age))
            self.pair.serial += 1

    @precondition(lambda self: self.pair.held("reserved"))
    @rule(data=st.data(), age=st.integers(-2, 5))
    def tighten(self, data, age):
        group = data.draw(st.sampled_from(self.pair.held("reserved")))
        self.pair.do("tighten", group, self.version(age))

    @precondition(lambda self: self.pair.held("reserved"))
    @rule(data=st.data())
    def occupy(self, data):
        self.pair.do("occupy", data.draw(st.sampled_from(self.pair.held("reserved"))))

    @precondition(lambda self: self.pair.held())
    @rule(data=st.data())
    def release(self, data):
        self.pair.do("release", data.draw(st.sampled_from(self.pair.held())))

    @precondition(lambda self: self.pair.fast.ready())
    @rule()
    def consume(self):
        self.pair.do("consume")

    @rule(data=st.data(), operation=st.sampled_from(["tighten", "occupy", "release", "consume"]))
    def late_or_repeated(self, data, operation):
        gone = [*self.pair.ended, self.pair.serial]
        if operation in ("tighten", "occupy"):
            gone += self.pair.held("occupied")
        group = data.draw(st.sampled_from(gone))
        arguments = {"tighten": (group, 0), "consume": ()}.get(operation, (group,))
        if operation != "consume" or not self.pair.fast.ready():
            with pytest.raises(ProtocolError):
                getattr(self.pair.fast, operation)(*arguments)
            self.pair.check(operation)

    @precondition(lambda self: self.pair.held())
    @rule(data=st.data(), age=st.integers(-2, 5))
    def reserve_twice(self, data, age):
        group = data.draw(st.sampled_from(self.pair.held()))
        with pytest.raises(ProtocolError):
            self.pair.fast.reserve(group, self.version(age))
        self.pair.check("reserve")


Protocol.TestCase.settings = settings(max_examples=250, stateful_step_count=60, deadline=None)
TestProtocol = Protocol.TestCase


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 2),
    st.integers(0, 1),
    st.integers(0, 2),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=8, max_size=40),
)
def test_no_placement_has_finished_work_earlier(target, extra, eta, steps):
    """As long as nobody starts ahead of the first buffer or makes its group's window smaller."""
    books = buffers(target, eta, num_batches=8, extra_groups=extra)
    for serial, (choice, pick) in enumerate(steps):
        rows = [Row(*row) for row in rows_of(books)]
        reserved = [row.group for row in rows if row.state == "reserved"]
        if books.ready() and choice == 0:
            books.consume()
        elif choice <= 2 and reserved:
            books.occupy(reserved[pick % len(reserved)])
        elif choice == 3 and rows:
            books.release(rows[pick % len(rows)].group)
        else:
            books.reserve(serial, max(0, books.first - pick % (eta + 1)))
        rows = [Row(*row) for row in rows_of(books)]
        if rows:
            best = best_placement(
                rows, target=target, size=target + extra, eta=eta, first=books.first, num_batches=8
            )
            occupied = [0] * len(best)
            for row in rows:
                occupied[row.place - books.first] += row.state == "occupied"
            assert occupied == best
