"""When an instance that lags pulls."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from rhymeflow.core.strategies.schedules import SYNC
from rhymeflow.core.strategies.sync import drained, greedy, status
from rhymeflow.core.strategies.view import FleetView, InstanceView, TrajectoryView
from tests.core.strategies.fleets import fleet, fleets, instance, new, partial, shown


def test_drained_waits_for_the_last() -> None:
    assert drained(instance(), fleet([]))
    assert not drained(instance(running=1), fleet([]))


def test_greedy_does_not_wait() -> None:
    assert greedy(instance(running=9, waiting=2), fleet([], [partial(0, 0)], admissible={0}))


BUSY = instance("a", 1, running=3)
FULL = instance("a", 1, running=3, capacity=3)


@pytest.mark.parametrize(
    ("there", "queue", "admissible", "pulls"),
    [
        (BUSY, [], set(), True),
        (instance("a", 1, running=3, waiting=1), [], set(), False),
        # What waits and may run here keeps it, if there is room.
        (BUSY, [partial(0, 1)], set(), False),
        (BUSY, [new(0, min_version=1)], set(), False),
        (FULL, [partial(0, 1)], set(), True),
        (BUSY, [partial(0, 2)], set(), True),
        # So does an entry for a new group, unless what stands before it may not run here.
        (BUSY, [], {1}, False),
        (FULL, [], {1}, False),
        (BUSY, [], {2}, True),
        (BUSY, [partial(0, 2)], {1}, True),
        # With nothing on it, it has nothing to wait for.
        (instance("a", 1), [partial(0, 1)], {1}, True),
    ],
)
def test_status(
    there: InstanceView, queue: list[TrajectoryView], admissible: set[int], pulls: bool
) -> None:
    assert status(there, fleet([there], queue, admissible=admissible)) is pulls


@pytest.mark.parametrize("rule", SYNC.values(), ids=SYNC)
@given(view=fleets())
def test_no_rule_holds_back_an_instance_with_nothing_on_it(rule, view: FleetView) -> None:
    """Else a run could stall; and the view stays as it is."""
    before = shown(view)
    for each in view.instances:
        assert rule(each, view) is rule(each, view)
        assert rule(each._replace(assigned={}, waiting=()), view)
        idle = replace(view, queue=(), lowest_waiting=None, admissible=frozenset())
        if rule is status and not each.waiting:
            assert rule(each, idle)
    assert shown(view) == before
