"""HistoPipe's routing and migration, in fleets that are laid out."""

from collections.abc import Collection
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.core.histopipe.pipeline import Pipeline, Place
from rhymeflow.core.histopipe.strategies import migrate_outliers, planned
from rhymeflow.core.strategies.base import FleetView, InstanceView, Migration, TrajectoryView
from rhymeflow.core.strategies.routing import fewest_requests
from rhymeflow.core.types import TrajectoryId
from tests.core.strategies.fleets import Predicted, fleet, fleets, instance, new, partial, shown


class Placed(Pipeline):
    """A layout written down."""

    def __init__(
        self,
        places: dict[TrajectoryId, tuple[int, str]],
        shares: dict[str, float] | None = None,
        moved: Collection[TrajectoryId] = (),
    ) -> None:
        super().__init__()
        self.places, self.shares, self.moved = places, shares or {}, moved
        self.num_steps = 1 + max((step for step, _ in places.values()), default=-1)

    def place(self, trajectory: TrajectoryId) -> Place | None:
        found = self.places.get(trajectory)
        return None if found is None else Place(*found)

    def has_moved(self, trajectory: TrajectoryId) -> bool:
        return trajectory in self.moved

    def share(self, name: str) -> float:
        return self.shares.get(name, 0.0)


def assigned(*steps: tuple[InstanceView, int]) -> dict[TrajectoryId, tuple[int, str]]:
    """What runs on each of these instances is of this step."""
    return {t: (step, there.name) for there, step in steps for t in there.assigned}


def routed(view: FleetView) -> list[tuple[int, str]]:
    return [(each.trajectory.group, each.instance) for each in planned(view)]


def placed(
    there: list[InstanceView],
    queue: list[TrajectoryView],
    layout: Placed,
    lengths: Predicted | None = None,
) -> FleetView:
    return replace(fleet(there, queue), layout=layout, lengths=lengths or Predicted())


# -- routing ---------------------------------------------------------------------------------------


@given(view=fleets())
def test_without_a_layout_it_is_fewest_requests(view):
    assert planned(view) == fewest_requests(view)
    assert list(migrate_outliers(view)) == []


@given(view=fleets(), data=st.data())
def test_what_is_routed_may_be(view, data):
    """Once each, to its place, on one that accepts it, in its step, with room."""
    names = [each.name for each in view.instances] or ["nowhere"]
    ids = [t.id for t in view.queue] + [t for x in view.instances for t in x.assigned]
    drawn = st.tuples(st.integers(0, 2), st.sampled_from(names))
    layout = Placed({t: data.draw(drawn) for t in ids if data.draw(st.booleans())})
    view = replace(view, layout=layout)
    before = shown(view)
    answer = planned(view)
    assert answer == planned(view)
    assert shown(view) == before
    assert len({each.trajectory for each in answer}) == len(answer)
    waiting = {t.id: t for t in view.queue}
    for there in view.instances:
        got = [each.trajectory for each in answer if each.instance == there.name]
        assert not got or (there.accepts and not there.waiting)
        assert len(there.assigned) + len(got) <= max(there.capacity, len(there.assigned))
        assert all(there.version >= waiting[t].min_version for t in got)
        assert all(layout.places[t][1] == there.name for t in got)
        now = layout.step(there.assigned)
        steps = [layout.places[t][0] for t in got]
        assert all(now is None or step <= now for step in steps), "an earlier step is left there"
        assert steps == sorted(steps)
        assert now is not None or len(set(steps)) <= 1
        kept = len(there.assigned) + len(got) <= 1
        full = there.kv_tokens + sum(waiting[t].tokens for t in got)
        assert kept or not got or full <= there.kv_capacity


def test_an_instance_begins_a_step_when_nothing_earlier_is_left():
    busy, free = instance("busy", running=1), instance("free")
    layout = Placed(
        {TrajectoryId(0, 0): (1, "busy"), TrajectoryId(1, 0): (1, "free"), **assigned((busy, 0))}
    )
    queue = [new(0), new(1)]
    assert routed(placed([busy, free], queue, layout)) == [(1, "free")]
    layout.places |= assigned((busy, 1))
    assert routed(placed([busy, free], queue, layout)) == [(0, "busy"), (1, "free")]
    assert routed(placed([busy, free], [new(2)], layout)) == [], "not laid out yet"


def test_the_earliest_step_first_then_what_was_begun_then_the_longest():
    layout = Placed({TrajectoryId(g, 0): (1 if g == 9 else 0, "a") for g in range(1, 10)})
    queue = [partial(5, 0), new(9), new(1), new(2), new(3)]
    lengths = Predicted(means={1: 500.0, 2: 2000.0, 3: 800.0})
    there = instance("a")
    assert [g for g, _ in routed(placed([there], queue, layout, lengths))] == [5, 2, 3, 1]
    few = there._replace(capacity=2)
    assert [g for g, _ in routed(placed([few], queue, layout, lengths))] == [5, 2]
    small = there._replace(kv_capacity=3500)
    assert [g for g, _ in routed(placed([small], queue, layout, lengths))] == [5, 2, 3]
    tiny = there._replace(kv_capacity=10)
    assert [g for g, _ in routed(placed([tiny], queue, layout, lengths))] == [5], "one, always"


# -- migration -------------------------------------------------------------------------------------


def outlying(
    there: list[InstanceView],
    *,
    share: float = 10.0,
    made: int = 2000,
    left: float = 1.0,
    **layout: Collection[TrajectoryId],
) -> list[Migration]:
    """Shares are of groups of two; the first's have `made` tokens, all others `left` to go."""
    tokens = dict.fromkeys(there[0].assigned, made)
    expected = {t.group: left for x in there[1:] for t in x.assigned}
    view = placed(
        there,
        [],
        Placed(assigned(*((x, 0) for x in there)), {x.name: share for x in there}, **layout),
        Predicted(tokens, expected),
    )
    return list(migrate_outliers(view))


def test_an_outlier_goes_on_in_the_next_step_if_nobody_goes_on_for_longer():
    there = instance("a", running=1)
    (trajectory,) = there.assigned
    (answer,) = outlying([there])
    assert answer == Migration("a", (trajectory,), "a", later=True)
    busy = instance("b", running=3)
    assert outlying([there, busy]) == [answer], "the other is done as soon"


def test_an_outlier_is_among_the_last_tenth_and_longer_than_was_predicted():
    there = instance("a", running=2)
    assert len(outlying([there])) == 2, "a tenth of ten groups of two"
    assert outlying([there], share=9.9) == []
    assert outlying([there], share=0.0) == [], "it was given none"
    assert outlying([there], made=1500) == [], "outlier_ratio times the expected"
    assert len(outlying([there], made=1501)) == 2
    (first, second) = there.assigned
    assert [m.trajectories for m in outlying([there], moved={first})] == [(second,)], "once each"


def test_nothing_is_an_outlier_where_nothing_is_predicted():
    there = instance("a", running=1)
    tokens = dict.fromkeys(there.assigned, 2000)
    layout = Placed(assigned((there, 0)), {"a": 10.0})
    for explained in (0.0, 0.1):
        found = list(
            migrate_outliers(placed([there], [], layout, Predicted(tokens, {}, explained)))
        )
        assert len(found) == (explained > 0)
    beyond = placed([there], [], Placed({}, {"a": 10.0}), Predicted(tokens))
    assert list(migrate_outliers(beyond)) == [], "it is not laid out"


def test_an_outlier_goes_to_one_that_is_fresh_enough_and_has_longer_to_go():
    there = instance("a", 1, running=1)
    (trajectory,) = there.assigned

    def target(*others: InstanceView) -> tuple[str | None, bool]:
        (answer,) = outlying([there, *others], left=5000.0)
        assert answer.trajectories == (trajectory,)
        return answer.to, answer.later

    assert target(instance("b", 1, running=3)) == ("b", False)
    assert target(instance("b", 2, running=3)) == ("b", False)
    assert target(instance("b", 0, running=3)) == ("a", True), "of older weights"
    assert target(instance("b", 1, running=1)) == ("a", True), "it would be kept in turn"
    assert target(instance("b", 1, running=3, capacity=3)) == ("a", True), "full"
    assert target(instance("b", 1, running=4), instance("c", 1, running=3)) == ("c", False)
