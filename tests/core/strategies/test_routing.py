"""Routing: a slow formula as the oracle of each rule, and what they keep from tick to tick."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.core.strategies.base import (
    Assignment,
    FleetView,
    InstanceView,
    TrajectoryView,
    weighed,
)
from rhymeflow.core.strategies.gains import Class, Gains
from rhymeflow.core.strategies.routing import fewest_requests, waterfall
from tests.core.strategies.fleets import (
    COST_14B,
    SETTINGS,
    fleet,
    fleets,
    instance,
    new,
    partial,
    shown,
)

Rule = Callable[[FleetView], list[Assignment]]
RULES = pytest.mark.parametrize("rule", [fewest_requests, waterfall])


def where(proposals: list[Assignment]) -> dict[int, str]:
    return {proposal.trajectory.group: proposal.instance for proposal in proposals}


class Endless:
    """A queue without end, which counts what is read of it."""

    def __init__(self) -> None:
        self.num_read = 0

    def __iter__(self) -> Iterator[TrajectoryView]:
        for group in count():
            self.num_read += 1
            yield new(group)


@RULES
def test_reading_stops_when_the_fleet_is_full(rule: Rule) -> None:
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
    usable = 1 - view.settings.kv_headroom
    for trajectory in view.queue:
        if trajectory.version is None and view.num_returning:
            break
        tokens = trajectory.tokens
        able = [
            i
            for i, x in enumerate(view.instances)
            if x.accepts and not x.waiting and x.version >= trajectory.min_version
            if counts[i] < x.capacity and kv_tokens[i] < x.kv_capacity
            if kv_tokens[i] + tokens <= usable * x.kv_capacity
        ]
        versions = sorted({view.instances[i].version for i in able})
        tried = [i for i in able if view.instances[i].name == trajectory.home]
        for version in versions if trajectory.version is not None else reversed(versions):
            of_class = [i for i in able if view.instances[i].version == version]
            gains = [(cost.gain(counts[i], kv_tokens[i], weighed(tokens)), -i) for i in of_class]
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
def test_a_rule_is_the_slow_formula_and_leaves_the_view_as_it_is(
    rule: Rule, slow: Rule, view: FleetView
) -> None:
    before = shown(view)
    assert rule(view) == slow(view)
    assert shown(view) == before


def test_what_would_slow_all_others_waits_for_an_empty_instance() -> None:
    busy, queue = instance("busy", running=[10]), [new(0, 5000)]
    slow = replace(COST_14B, k1=1e-4)
    assert where(waterfall(fleet([busy], queue, cost=slow))) == {}
    assert where(waterfall(fleet([busy, instance("empty")], queue, cost=slow))) == {0: "empty"}


@given(tokens=st.integers(0, 10**7))
def test_weighed_is_the_power_of_two_below(tokens: int) -> None:
    size = weighed(tokens)
    assert size <= tokens <= max(0, 2 * size - 1)
    assert size & (size - 1) == 0


# -- what is kept from one tick to the next, against the same made anew at every tick -------------

TOKENS = (100, 900, 1500, 3000, 60_000)
one = st.builds(
    instance,
    st.sampled_from("abc"),
    st.integers(0, 2),
    st.integers(0, 4),
    tokens=st.sampled_from(TOKENS),
    waiting=st.sampled_from([0, 0, 0, 1]),
    capacity=st.integers(1, 5),
    accepts=st.sampled_from([True, True, False]),
)
queues = st.lists(
    st.one_of(
        st.builds(new, st.integers(0, 99), st.sampled_from(TOKENS)),
        st.builds(partial, st.integers(0, 99), st.integers(0, 2), st.sampled_from(TOKENS)),
    ),
    max_size=12,
)


def with_all(view: InstanceView, given: list[tuple[int, int]]) -> InstanceView:
    """The instance with what routing gave it."""
    extra = {(10_000 + group, 0): tokens for group, tokens in given}
    more = sum(tokens for _, tokens in given)
    return view._replace(assigned={**view.assigned, **extra}, kv_tokens=view.kv_tokens + more)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_is_kept_gives_the_answer_that_a_new_one_gives(data) -> None:
    memo: dict = {}
    views = data.draw(st.lists(one, min_size=1, max_size=6))
    for _ in range(6):
        queue = data.draw(queues)
        view = replace(fleet(views, queue, kv_headroom=0.1), memo=memo, settings=SETTINGS)
        found = waterfall(view)
        assert found == waterfall(replace(view, memo={}))
        tokens = {t.id: t.tokens for t in queue}
        happens = data.draw(st.lists(st.sampled_from("gkc"), min_size=6, max_size=6))
        for place, what in enumerate(happens[: len(views)]):
            if what == "g":  # it got what was proposed
                mine = [a for a in found if a.instance == views[place].name]
                views[place] = with_all(
                    views[place], [(a.trajectory.group, tokens[a.trajectory]) for a in mine]
                )
            elif what == "c":
                views[place] = data.draw(one)
        number = data.draw(st.integers(1, 6))  # some leave, some join
        views = views[:number] + data.draw(st.lists(one, min_size=0, max_size=6 - number))


def test_a_heap_does_not_grow_for_ever() -> None:
    gains = Gains(SETTINGS)
    for turn in range(500):
        views = [instance("a", 0, turn % 7), instance("b", 0, turn % 5)]
        classes = gains.show(fleet(views))
        assert classes[0].accepting(new(0, 1000)) is not None
    assert sum(len(heap) for heap in classes[0]._heaps.values()) < 100


def test_an_instance_that_stays_as_it_was_is_not_entered_again(monkeypatch) -> None:
    put: list[int] = []
    kept = Class.put
    monkeypatch.setattr(
        Class, "put", lambda self, view, place: (put.append(place), kept(self, view, place))
    )
    gains, views = Gains(SETTINGS), [instance("a"), instance("b"), instance("c")]
    gains.show(fleet(views))
    put.clear()
    gains.show(fleet([views[0], instance("b", 0, 2), views[2]]))
    assert put == [1]
