"""Routing: a slow formula as the oracle of each rule."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.core.strategies.base import (
    KV_HEADROOM,
    Assignment,
    FleetView,
    TrajectoryView,
    size_class,
)
from rhymeflow.core.strategies.routing import fewest_requests, waterfall
from tests.core.strategies.fleets import fleet, fleets, instance, new, shown

Rule = Callable[[FleetView], list[Assignment]]
RULES = pytest.mark.parametrize("rule", [fewest_requests, waterfall])


class Endless:
    """A queue without end, which counts what is read of it."""

    def __init__(self) -> None:
        self.num_read = 0

    def __iter__(self) -> Iterator[TrajectoryView]:
        for group in count():
            self.num_read += 1
            yield new(group)


@RULES
def test_reading_stops_when_the_fleet_is_full(rule):
    queue = Endless()
    there = [instance("a", capacity=3), instance("b", capacity=2)]
    assert len(rule(replace(fleet(there), queue=queue))) == 5
    assert queue.num_read <= 6


# -- fewest requests ------------------------------------------------------------------------------


def fewest_slowly(view: FleetView) -> list[Assignment]:
    """Look at every instance for each trajectory."""
    counts = [len(x.assigned) for x in view.instances]
    kv_tokens = [x.kv_tokens for x in view.instances]
    proposals = []
    for trajectory in view.queue:
        able = [
            (counts[i], i)
            for i, x in enumerate(view.instances)
            if x.accepts and x.version >= trajectory.min_version
            if counts[i] < x.capacity and kv_tokens[i] < x.kv_capacity
        ]
        if able:
            at_home = [i for _, i in able if view.instances[i].name == trajectory.home]
            i = at_home[0] if at_home else min(able)[1]
            counts[i] += 1
            kv_tokens[i] += trajectory.tokens
            proposals.append(Assignment(trajectory.id, view.instances[i].name))
    return proposals


# -- waterfall ------------------------------------------------------------------------------------


def waterfall_slowly(view: FleetView) -> list[Assignment]:
    """Look at every instance for each trajectory."""
    cost = view.settings.cost
    counts = [len(x.assigned) for x in view.instances]
    kv_tokens = [x.kv_tokens for x in view.instances]
    proposals = []
    for trajectory in view.queue:
        if trajectory.version is None and view.num_returning:
            break
        tokens = trajectory.tokens
        able = [
            i
            for i, x in enumerate(view.instances)
            if x.accepts and not x.waiting and x.version >= trajectory.min_version
            if counts[i] < x.capacity and kv_tokens[i] < x.kv_capacity
            if kv_tokens[i] + tokens <= (1 - KV_HEADROOM) * x.kv_capacity
        ]
        versions = sorted({view.instances[i].version for i in able})
        tried = [i for i in able if view.instances[i].name == trajectory.home]
        for version in versions if trajectory.version is not None else reversed(versions):
            of_class = [i for i in able if view.instances[i].version == version]
            gains = [(cost.gain(counts[i], kv_tokens[i], size_class(tokens)), -i) for i in of_class]
            tried.append(-max(gains)[1])
        for i in tried:
            if not counts[i] or cost.gain(counts[i], kv_tokens[i], tokens) >= 0:
                break
        else:
            break
        counts[i] += 1
        kv_tokens[i] += tokens
        proposals.append(Assignment(trajectory.id, view.instances[i].name))
    return proposals


@pytest.mark.parametrize(
    ("rule", "slow"), [(fewest_requests, fewest_slowly), (waterfall, waterfall_slowly)]
)
@given(view=fleets())
def test_a_rule_is_the_slow_formula_and_leaves_the_view_as_it_is(rule, slow, view):
    before = shown(view)
    assert rule(view) == slow(view)
    assert shown(view) == before


@given(tokens=st.integers(0, 10**7))
def test_weighed_is_the_power_of_two_below(tokens):
    size = size_class(tokens)
    assert size <= tokens <= max(0, 2 * size - 1)
    assert size & (size - 1) == 0
