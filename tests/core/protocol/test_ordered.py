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
