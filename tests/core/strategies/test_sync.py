"""When an instance that lags pulls."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from rhymeflow.core.strategies.base import FleetView
from rhymeflow.core.strategies.schedules import SYNC
from rhymeflow.core.strategies.sync import gather_stragglers, when_version_unusable
from tests.core.strategies.fleets import fleet, fleets, instance, new, partial, shown

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
def test_status(there, queue, admissible, pulls):
    assert when_version_unusable(there, fleet([there], queue, admissible=admissible)) is pulls


@pytest.mark.parametrize("rule", SYNC.values(), ids=SYNC)
@given(view=fleets())
def test_no_rule_holds_back_an_instance_with_nothing_on_it(rule, view):
    """Else a run could stall; and the view stays as it is."""
    before = shown(view)
    for each in view.instances:
        assert rule(each, view) is rule(each, view)
        assert rule(each._replace(assigned={}, waiting=()), view)
        idle = replace(view, queue=(), lowest_waiting=None, admissible=frozenset())
        if rule is when_version_unusable and not each.waiting:
            assert rule(each, idle)
    assert shown(view) == before


def lagging(*counts: int, fresh: int = 1, **changes: Any) -> FleetView:
    """Instances of version 1 with so many responses of 1,000 tokens, and some of version 2."""
    old = [instance(f"old-{i}", 1, running=count) for i, count in enumerate(counts)]
    new_ones = [instance(f"new-{i}", 2, running=1) for i in range(fresh)]
    return replace(fleet([*old, *new_ones], **changes), published=2)


def pulling(view: FleetView) -> list[str]:
    return [x.name for x in view.instances if x.version == 1 and gather_stragglers(x, view)]


def test_those_with_the_most_stay_and_take_over_what_the_others_have():
    # 1,000 tokens cost 0.12 ms beside 14 ms: some thirty are not a quarter slower than one.
    assert pulling(lagging(2, 7, 1, 3)) == ["old-0", "old-2", "old-3"]
    assert pulling(lagging(2, 7, 1, 3, max_slowdown=1.06)) == ["old-0", "old-2"], "eight at most"
    assert pulling(lagging(2, 7, 1, 3, max_slowdown=1.01)) == [], "two at most"


@pytest.mark.parametrize(
    ("queue", "admissible"),
    [([partial(0, 1)], set()), ([new(0, min_version=1)], set()), ([], {1})],
    ids=["partial", "new member", "new group"],
)
def test_none_pulls_while_its_version_is_of_use(queue, admissible):
    assert pulling(lagging(2, 7, queue=queue, admissible=admissible)) == []


def test_each_version_keeps_instances_for_its_own():
    """Routing sends stragglers to the lowest version that may run them, however full it is."""
    view = lagging(2, 7, 1, 3, max_slowdown=1.06)
    older = [instance(f"older-{i}", 0, running=count) for i, count in enumerate((1, 2))]
    view = replace(view, instances=(*older, *view.instances))
    left = [x.name for x in view.instances if x.version < 2 and gather_stragglers(x, view)]
    assert left == ["older-0", "old-0", "old-2"], "eight at most, of two versions"


def test_not_all_of_a_fleet_stay():
    """Else nothing new could begin until one has run empty."""
    assert pulling(lagging(2, fresh=0)) == ["old-0"]
    assert pulling(lagging(9, 8, 7, fresh=0, max_slowdown=1.001)) == ["old-2"]
