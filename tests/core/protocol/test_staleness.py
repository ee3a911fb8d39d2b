"""The protocol alone: its rules one by one, and random interleavings against the naive model.

As a program (`make nightly`) about a million operations."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rhymeflow.core.protocol.staleness import ProtocolError, StalenessBuffers
from tests.core.protocol.naive import Row, best_placement
from tests.core.protocol.pair import Pair, rows_of


def buffers(**sizes) -> StalenessBuffers:
    fields = {"groups_per_batch": 2, "max_staleness": 1, "num_batches": 100, "extra_groups": 0}
    return StalenessBuffers(**fields | sizes)


@pytest.mark.parametrize(
    ("question", "arguments"), [("version", (9,)), ("state", (-1,)), ("state", (100,))]
)
def test_what_is_asked_of_what_is_not_there_is_refused(question, arguments):
    """Operations that are refused are in `Protocol.late_or_repeated`."""
    with pytest.raises(ProtocolError):
        getattr(buffers(), question)(*arguments)


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
    """Every operation in any order, both sides compared and the laws checked after each. Versions
    run from behind every window to beyond the first buffer. Any operation is also tried on groups
    that hold no entry, or one of another kind, as late and repeated events would have it."""

    is_ordered = False

    @initialize(
        size=st.integers(1, 4),
        extra=st.integers(0, 3),
        eta=st.integers(0, 4),
        num_batches=st.integers(1, 12),
    )
    def start(self, size, extra, eta, num_batches):
        self.pair = Pair(
            is_ordered=self.is_ordered, groups_per_batch=size, extra_groups=extra,
            max_staleness=eta, num_batches=num_batches,
        )  # fmt: skip

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


Protocol.TestCase.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
TestProtocol = Protocol.TestCase


class Ordered(Protocol):
    """The same of batches in the order of requests."""

    is_ordered = True


Ordered.TestCase.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
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
    sizes = {"groups_per_batch": target, "extra_groups": extra, "max_staleness": eta}
    protocol = buffers(**sizes, num_batches=8)
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
                rows, target=target, size=target + extra, eta=eta, first=protocol.first,
                num_batches=8,
            )  # fmt: skip
            occupied = [0] * len(best)
            for row in rows:
                occupied[row.place - protocol.first] += row.state == "occupied"
            assert occupied == best


if __name__ == "__main__":
    longer = settings(
        max_examples=6500, stateful_step_count=200, deadline=None, database=None,
        print_blob=True, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    for machine in (Protocol, Ordered):
        run_state_machine_as_test(machine, settings=longer)
