"""What is sent back, what is shared, and that it ends."""

from collections import Counter
from dataclasses import replace

from hypothesis import event, given, settings
from hypothesis import strategies as st

from rhymeflow.core.strategies.base import FleetView, InstanceView, TrajectoryView
from rhymeflow.core.strategies.migration import rebalance, skip_nearly_done
from rhymeflow.core.strategies.routing import fewest_requests, waterfall
from rhymeflow.core.types import TrajectoryId
from tests.core.strategies.fleets import (
    SETTINGS,
    Predicted,
    fleet,
    fleets,
    instance,
    partial,
    shown,
)


def moved(view: FleetView) -> dict[str, int]:
    return {m.instance: len(m.trajectories) for m in rebalance(view)}


@given(view=fleets(), is_empty=st.booleans())
def test_only_what_is_there_is_taken_and_only_once(view, is_empty):
    if is_empty:
        view = replace(view, queue=(), lowest_waiting=None, admissible=frozenset())
    before = shown(view)
    answer = rebalance(view)
    assert answer == rebalance(view)
    assert shown(view) == before
    there = {x.name: x for x in view.instances}
    taken = Counter((m.instance, t) for m in answer for t in m.trajectories)
    assert all(t in there[name].assigned for name, t in taken)
    assert set(taken.values()) <= {1}
    assert all(m.trajectories for m in answer)


def test_more_than_so_many_waiting_are_sent_back():
    there = [instance("three", running=9, waiting=3), instance("four", running=9, waiting=4)]
    assert rebalance(fleet(there, [partial(0, 0)])) == (), "nowhere is there room for them"
    there.append(instance("room", running=9))
    answer = rebalance(fleet(there, [partial(0, 0)]))
    assert [(m.instance, m.trajectories) for m in answer] == [("four", there[1].waiting)]
    # While anything is sent back, nothing is shared: the starved will be served by that.
    assert moved(fleet([*there, instance("idle")])) == {"four": 4}


def test_a_starved_instance_gets_the_shorter_ones():
    busy = instance("busy", running=[900, 100, 500, 300, 700, 200, 800, 400, 600, 1000])
    (answer,) = rebalance(fleet([busy, instance("idle")]))
    lengths = [busy.assigned[t] for t in answer.trajectories]
    # A fifth would make the idle one the more loaded: as many, with less in the cache.
    assert (answer.instance, lengths) == ("busy", [100, 200, 300, 400])


def test_who_is_not_starved_gets_nothing():
    busy = instance("busy", 1, running=40)
    assert moved(fleet([busy, instance("idle", 1)])) == {"busy": 20}
    # Its share is above a fifth; the queue, a new group or what is on its way back will fill it;
    # it may not take anything, or waits for room itself;
    # it holds another version, whose turn the partial ones would not come to.
    assert moved(fleet([busy, instance("some", 1, running=10)])) == {}
    assert moved(fleet([busy, instance("some", 1, running=10)], throughput_ratio=2)) == {"busy": 15}
    assert moved(fleet([busy, instance("idle", 1)], [partial(0, 3)])) == {}
    assert moved(fleet([busy, instance("idle", 1)], admissible={1})) == {}
    assert moved(fleet([busy, instance("idle", 1)], num_returning=1)) == {}
    assert moved(fleet([busy, instance("idle", 1, accepts=False)])) == {}
    assert moved(fleet([busy, instance("idle", 2)])) == {}
    assert moved(fleet([busy, instance("some", 1, running=3, waiting=1)])) == {}


def test_no_more_than_routing_would_give_it():
    there = Fleet(fleet([instance("busy", running=60), instance("idle")]))
    assert there.migrate() > 5
    there.route(waterfall)
    assert not there.queue


def test_each_starved_one_has_its_own_donor():
    there = [instance("a", running=40), instance("b"), instance("c", running=60), instance("d")]
    assert moved(fleet(there)) == {"c": 30, "a": 20}


# -- it ends --------------------------------------------------------------------------------------


class Fleet:
    """Instances that do what they are told, and decode nothing meanwhile."""

    def __init__(self, view: FleetView) -> None:
        self.settings = view.settings
        self.instances = {x.name: x._replace(waiting=()) for x in view.instances}
        self.versions = {t: x.version for x in view.instances for t in x.assigned}
        self.queue: dict[TrajectoryId, TrajectoryView] = {}

    def view(self) -> FleetView:
        queue = sorted(self.queue.values(), key=lambda t: t.min_version)
        there = list(self.instances.values())
        return fleet(there, queue, settings=self.settings)

    def change(self, name: str, assigned: dict[TrajectoryId, int]) -> None:
        there = self.instances[name]
        kv_tokens = sum(assigned.values())
        self.instances[name] = there._replace(assigned=assigned, kv_tokens=kv_tokens)

    def migrate(self) -> int:
        count = 0
        for name, trajectories, *_ in rebalance(self.view()):
            assigned = dict(self.instances[name].assigned)
            for t in trajectories:
                self.queue[t] = TrajectoryView(
                    t, self.versions[t], self.versions[t], assigned.pop(t)
                )
            self.change(name, assigned)
            count += len(trajectories)
        return count

    def route(self, rule) -> None:
        for trajectory, name in rule(self.view()):
            tokens = self.queue.pop(trajectory).tokens
            self.change(name, {**self.instances[name].assigned, trajectory: tokens})


@st.composite
def crowded(draw) -> FleetView:
    """Instances from empty to full, of few versions."""
    there: list[InstanceView] = []
    for place in range(draw(st.integers(2, 8))):
        low = draw(st.sampled_from([1, 1000, 20_000]))
        lengths = draw(
            st.one_of(
                st.just([]),
                st.lists(st.integers(low, 2 * low), max_size=3),
                st.lists(st.integers(low, 20 * low), min_size=10, max_size=40),
            )
        )
        there.append(
            instance(f"i{place}", draw(st.integers(0, 1)), lengths, kv_capacity=10**6)._replace(
                accepts=draw(st.sampled_from([True, True, True, False]))
            )
        )
    ratio = draw(st.sampled_from([1.01, 2.0, 5.0]))
    return fleet(there, settings=replace(SETTINGS, throughput_ratio=ratio))


@settings(max_examples=300, deadline=None)
@given(view=crowded(), rule=st.sampled_from([waterfall, fewest_requests]))
def test_sharing_settles(view, rule):
    there, moves = Fleet(view), [1]
    while moves[-1] and len(moves) < 20:
        moves.append(there.migrate())
        there.route(rule)
    event(f"rounds: {len(moves) - 1}")
    assert moves[-1] == 0, moves


def test_what_is_about_to_end_is_not_moved():
    view = fleet([instance("giver", running=12), instance("taker")])
    all_of_them = {t for m in rebalance(view) for t in m.trajectories}
    assert any(t.group % 2 for t in all_of_them)
    assert skip_nearly_done(view) == rebalance(view), "nothing is known of lengths"
    lengths = Predicted(means={t.group: 1.0 if t.group % 2 else 10_000.0 for t in all_of_them})
    answer = skip_nearly_done(replace(view, lengths=lengths))
    assert {t for m in answer for t in m.trajectories} == {
        t for t in all_of_them if not t.group % 2
    }
