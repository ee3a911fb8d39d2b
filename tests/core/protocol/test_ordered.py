"""Batches in the order of requests: its rules one by one, and what they are for.

Random interleavings of every operation against the naive model are in `test_staleness.py`.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.core.protocol.ordered import OrderedBuffers


def buffers(groups_per_batch=2, max_staleness=1, extra_groups=0) -> OrderedBuffers:
    return OrderedBuffers(
        groups_per_batch=groups_per_batch,
        extra_groups=extra_groups,
        max_staleness=max_staleness,
        num_batches=200,
    )


def test_reserve_takes_the_lowest_and_then_refuses():
    protocol = buffers()
    assert [protocol.reserve(g, 0) for g in range(5)] == [0, 0, 1, 1, None]


def test_what_finishes_first_waits_for_its_own_batch():
    protocol = buffers()
    for group in range(4):
        protocol.reserve(group, 0)
    for group in (3, 2, 1):
        assert protocol.occupy(group) == ()
        assert not protocol.ready()
    protocol.occupy(0)
    assert protocol.consume() == (0, 1)
    assert protocol.consume() == (2, 3)


def test_what_is_released_gives_its_entry_to_the_next_in_order_finished_or_not():
    protocol = buffers()
    for group in range(4):
        protocol.reserve(group, 0)
    for group in (0, 1, 3):
        protocol.occupy(group)
    protocol.release(1)
    assert [protocol.place(group) for group in (0, 2, 3)] == [0, 0, 1]
    assert not protocol.ready()
    assert protocol.reserve(4, 0) == 1, "the hole has moved to the end"
    protocol.occupy(2)
    assert protocol.consume() == (0, 2)


def test_a_hole_takes_nothing_its_window_does_not_admit():
    protocol = buffers()
    for group, version in enumerate((0, 0, 1, 0)):
        protocol.reserve(group, version)
    protocol.release(0)
    assert [protocol.place(group) for group in (1, 2, 3)] == [0, 1, 0]


def test_a_member_that_starts_at_an_older_version_moves_its_group_into_the_smaller_window():
    protocol = buffers(groups_per_batch=1, max_staleness=2)
    assert [protocol.reserve(g, 1) for g in range(3)] == [1, 2, 3]
    assert protocol.tighten(2, 0), "buffer 0 is EMPTY"
    assert protocol.place(2) == 0
    assert not protocol.tighten(1, -1), "no entry up to buffer 1 is"
    assert protocol.place(1) == 2


def test_of_more_groups_than_a_batch_takes_those_that_finish_last_are_surplus():
    protocol = buffers(extra_groups=1)
    for group in range(4):
        protocol.reserve(group, 0)
    protocol.occupy(3)
    protocol.occupy(2)
    assert protocol.occupy(0) == (1,)
    assert protocol.consume() == (0, 2)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(0, 3),
    st.sets(st.integers(0, 60), max_size=20),
    st.lists(st.integers(0, 1000), min_size=120, max_size=120),
)
def test_batches_are_the_same_whatever_finishes_first(target, eta, filtered, picks):
    """The first groups that are left; a group is filtered when it is finished, or is not."""
    protocol = buffers(target, eta)
    trained: list[int] = []
    running: list[int] = []
    group = 0
    for pick in picks:
        while protocol.ready():
            trained += protocol.consume()
        while protocol.reserve(group, protocol.first) is not None:
            running.append(group)
            group += 1
        done = running.pop(pick % len(running))
        protocol.occupy(done)
        if done in filtered:
            protocol.release(done)
    kept = [g for g in range(group) if g not in filtered]
    assert trained == kept[: len(trained)]
