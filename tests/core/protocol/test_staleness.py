"""The protocol alone: its rules one by one, and random interleavings against the naive model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rhymeflow.core.protocol.staleness import ProtocolError, StalenessBuffers
from tests.core.protocol.naive import Row, best_placement
from tests.core.protocol.pair import Pair, rows_of


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
    protocol = buffers()
    assert [protocol.reserve(g, 0) for g in range(5)] == [1, 1, 0, 0, None]
    assert not protocol.admissible(0)
    assert protocol.admissible(1)


def test_occupy_takes_the_lowest_even_if_reserved_late():
    protocol = buffers()
    protocol.reserve(0, 0)
    protocol.occupy(0)
    assert protocol.place(0) == 0


def test_backfill_moves_a_younger_reservation_out_of_the_way():
    protocol = buffers(groups_per_batch=1, max_staleness=1)
    assert protocol.reserve(0, 0) == 1
    assert protocol.reserve(1, 0) == 0
    protocol.occupy(0)
    assert protocol.place(0) == 0, "0 has finished first and takes the first batch"
    assert protocol.place(1) == 1, "1 moved into the hole that 0 gave up"
    assert protocol.ready()
    assert protocol.consume() == (0,)


def test_a_reservation_that_cannot_wait_is_not_moved():
    protocol = buffers(groups_per_batch=1, max_staleness=2)
    protocol.reserve(0, 0)
    protocol.reserve(1, 0)
    protocol.reserve(2, 0)  # buffers 2, 1, 0
    protocol.occupy(2)
    protocol.consume()
    protocol.occupy(1)
    protocol.consume()
    assert protocol.reserve(3, 2) == 4
    protocol.occupy(3)
    assert protocol.place(3) == 3
    assert protocol.place(0) == 2, "group 0 of version 0 may not be later than buffer 2"


def test_tighten_moves_the_reservation_earlier_or_refuses():
    protocol = buffers(groups_per_batch=1, max_staleness=1)
    assert protocol.reserve(0, 1) == 2
    assert protocol.tighten(0, 1)
    assert protocol.tighten(0, 0)
    assert protocol.place(0) == 1
    assert protocol.version(0) == 0
    assert protocol.reserve(1, 1) == 2
    assert protocol.reserve(2, 0) == 0
    assert not protocol.tighten(1, 0), "no room left in 0..1"
    assert protocol.version(1) == 1


def test_nothing_is_admitted_beyond_the_last_batch():
    protocol = buffers(groups_per_batch=1, max_staleness=5, num_batches=2)
    assert [protocol.reserve(g, 0) for g in range(3)] == [1, 0, None]


def test_consume_gives_groups_in_ascending_order():
    protocol = buffers(groups_per_batch=3, max_staleness=0)
    for g in (2, 0, 1):
        protocol.reserve(g, 0)
    for g in (1, 2, 0):
        protocol.occupy(g)
    assert protocol.consume() == (0, 1, 2)
    assert protocol.first == 1


def test_release_fills_the_hole_with_finished_work_and_so_on():
    protocol = buffers(groups_per_batch=1, max_staleness=2)
    for g in range(3):
        protocol.reserve(g, 0)  # buffers 2, 1, 0
    for g in (2, 1, 0):
        protocol.occupy(g)
    assert [protocol.place(g) for g in range(3)] == [2, 1, 0]
    assert protocol.release(2) == ()
    assert [protocol.place(g) for g in range(3)] == [0, 1, None], "the lowest group_id goes first"
    assert protocol.ready()
    protocol.release(0)
    assert protocol.place(1) == 0


def test_a_hole_takes_the_oldest_finished_group_first():
    protocol = buffers(groups_per_batch=1, max_staleness=2)
    protocol.reserve(0, 1)  # buffer 3
    protocol.reserve(1, 0)  # 2
    protocol.reserve(2, 0)  # 1
    protocol.reserve(3, 0)  # 0
    for g in (3, 2, 0, 1):
        protocol.occupy(g)
    assert [protocol.place(g) for g in range(4)] == [3, 2, 1, 0]
    protocol.release(2)
    assert protocol.place(1) == 1


def test_a_hole_takes_nothing_its_window_does_not_admit():
    protocol = buffers(groups_per_batch=1, max_staleness=1)
    protocol.reserve(0, 0)
    protocol.reserve(1, 0)
    protocol.occupy(0)
    protocol.reserve(2, 1)
    protocol.occupy(2)
    assert (protocol.place(0), protocol.place(1), protocol.place(2)) == (0, 1, 2)
    protocol.release(0)
    assert protocol.place(2) == 2, "a group of version 1 has no business in batch 0"
    assert not protocol.ready()


def test_who_is_still_reserved_when_the_target_is_met_is_surplus():
    protocol = buffers(groups_per_batch=2, extra_groups=2, max_staleness=0)
    assert [protocol.reserve(g, 0) for g in range(5)] == [0, 0, 0, 0, None]
    assert protocol.state(0) == "stuck"
    assert protocol.occupy(2) == ()
    assert protocol.reserved_in(0) == (0, 1, 3)
    assert protocol.occupy(0) == (1, 3)
    assert protocol.place(1) is None
    assert protocol.state(0) == "ready_with_capacity"
    assert protocol.reserve(4, 0) is None, "spare entries of a complete batch are no room"
    assert protocol.consume() == (0, 2)


def test_a_reservation_that_can_wait_is_no_surplus():
    protocol = buffers(groups_per_batch=1, extra_groups=1, max_staleness=1)
    assert [protocol.reserve(g, 0) for g in range(4)] == [1, 1, 0, 0]
    assert protocol.occupy(0) == (2,), "3 moved into the entry that 0 gave up; 2 found none"
    assert protocol.place(3) == 1


def test_a_release_too_can_complete_a_batch():
    protocol = buffers(groups_per_batch=1, extra_groups=1, max_staleness=1)
    assert [protocol.reserve(g, 0) for g in range(4)] == [1, 1, 0, 0]
    protocol.occupy(0)
    protocol.occupy(1)
    assert (protocol.place(0), protocol.place(1), protocol.place(3)) == (0, 1, None)
    assert protocol.reserve(4, 0) is None
    protocol.release(0)
    assert protocol.place(1) == 0, "finished work of batch 1 is in its place at once"
    assert protocol.ready()
    assert protocol.state(1) == "pending", "and batch 1 has room again"
    assert protocol.reserve(4, 0) == 1


def test_a_batch_that_is_complete_again_has_surplus_again():
    protocol = buffers(groups_per_batch=1, extra_groups=1, max_staleness=1)
    for g in range(4):
        protocol.reserve(g, 0)
    protocol.occupy(0)
    protocol.occupy(1)  # batches 0 and 1 are complete
    protocol.reserve(4, 1)  # 2
    protocol.reserve(5, 1)  # 2
    protocol.occupy(4)
    assert protocol.place(4) == 2
    assert protocol.release(1) == (), "4 takes its place in batch 1"
    assert protocol.place(4) == 1
    assert protocol.reserve(6, 0) is None
    assert protocol.release(0) == ()
    assert protocol.reserve(6, 0) == 0
    assert protocol.reserve(7, 0) == 0
    assert protocol.occupy(7) == (6,)


def test_states():
    protocol = buffers(groups_per_batch=1, max_staleness=0)
    assert protocol.state(0) == "pending"
    protocol.reserve(0, 0)
    assert protocol.state(0) == "stuck"
    protocol.occupy(0)
    assert protocol.state(0) == "ready"
    protocol.consume()
    with pytest.raises(ProtocolError):
        protocol.state(0)


def test_a_member_behind_its_siblings_makes_its_group_move_and_what_it_leaves_is_filled():
    protocol = buffers(groups_per_batch=1, max_staleness=2)
    assert protocol.reserve(0, 1) == 3
    assert protocol.reserve(1, 0) == 2
    assert protocol.reserve(2, 1) == 1
    assert protocol.tighten(0, 0)
    assert protocol.place(2) == 3, "moved later, from 1 into the entry that 0 left"
    assert protocol.place(0) == 1, "and 0, which had got entry 0, into the one that 2 left"


def tightened() -> StalenessBuffers:
    """1 has finished in buffer 4, of a version ahead of the first buffer; 2 has left buffer 3."""
    protocol = buffers(groups_per_batch=1, max_staleness=2)
    protocol.reserve(0, 0)
    protocol.occupy(0)
    protocol.consume()
    assert protocol.reserve(1, 2) == 4
    assert protocol.reserve(2, 1) == 3
    assert protocol.reserve(3, 0) == 2
    protocol.occupy(1)
    assert protocol.place(1) == 4, "2 and 3 have their last entries"
    assert protocol.tighten(2, 0)
    assert protocol.place(2) == 1
    return protocol


def test_finished_work_takes_the_hole_of_a_tightened_group_at_the_next_settling():
    protocol = tightened()
    protocol.release(2)
    assert protocol.place(1) == 3


def test_a_reservation_takes_the_entry_that_finished_work_gives_up():
    protocol = tightened()
    assert protocol.reserve(4, 2) == 3
    protocol.release(2)
    protocol.release(3)
    assert protocol.place(1) == 2
    assert protocol.place(4) == 4


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
    protocol = buffers()
    protocol.reserve(0, 0)
    protocol.reserve(1, 0)
    protocol.occupy(1)
    before = rows_of(protocol)
    with pytest.raises(ProtocolError):
        getattr(protocol, operation)(*arguments)
    assert rows_of(protocol) == before


def test_stale_look_ups_do_not_pile_up():
    protocol = buffers(groups_per_batch=4, max_staleness=0)
    for g in range(10_000):
        protocol.reserve(g, 0)
        if g % 2:
            protocol.occupy(g)
        protocol.release(g)
    (buffer,) = protocol.by_version.values()
    assert len(buffer.reserved._heap) + len(buffer.occupied._heap) < 100


class Protocol(RuleBasedStateMachine):
    """Every operation in any order, both sides compared and the laws checked after each.

    Versions run from behind every window to beyond the first buffer. Any operation is also tried
    on groups that hold no entry, or one of another kind, as late and repeated events would have it.
    """

    is_ordered = False

    @initialize(
        size=st.integers(1, 4),
        extra=st.integers(0, 3),
        eta=st.integers(0, 4),
        num_batches=st.integers(1, 12),
    )
    def start(self, size, extra, eta, num_batches):
        self.pair = Pair(
            is_ordered=self.is_ordered,
            groups_per_batch=size,
            extra_groups=extra,
            max_staleness=eta,
            num_batches=num_batches,
        )

    def version(self, age: int) -> int:
        return max(0, self.pair.fast.first - age)

    @rule(age=st.integers(-2, 5), count=st.integers(1, 4))
    def reserve(self, age, count):
        for _ in range(count):
            self.pair.do("reserve", self.pair.group_id, self.version(age))
            self.pair.group_id += 1

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
        gone = [*self.pair.ended, self.pair.group_id]
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


class Ordered(Protocol):
    """The same of batches in the order of requests."""

    is_ordered = True


Ordered.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestOrdered = Ordered.TestCase


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 2),
    st.integers(0, 1),
    st.integers(0, 2),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=8, max_size=40),
)
def test_no_placement_has_finished_work_earlier(target, extra, eta, steps):
    """As long as nobody starts ahead of the first buffer or makes its group's window smaller."""
    protocol = buffers(target, eta, num_batches=8, extra_groups=extra)
    for group_id, (choice, pick) in enumerate(steps):
        rows = [Row(*row) for row in rows_of(protocol)]
        reserved = [row.group for row in rows if row.state == "reserved"]
        if protocol.ready() and choice == 0:
            protocol.consume()
        elif choice <= 2 and reserved:
            protocol.occupy(reserved[pick % len(reserved)])
        elif choice == 3 and rows:
            protocol.release(rows[pick % len(rows)].group)
        else:
            protocol.reserve(group_id, max(0, protocol.first - pick % (eta + 1)))
        rows = [Row(*row) for row in rows_of(protocol)]
        if rows:
            best = best_placement(
                rows,
                target=target,
                size=target + extra,
                eta=eta,
                first=protocol.first,
                num_batches=8,
            )
            occupied = [0] * len(best)
            for row in rows:
                occupied[row.place - protocol.first] += row.state == "occupied"
            assert occupied == best
