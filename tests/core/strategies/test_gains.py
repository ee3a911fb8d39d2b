"""What routing keeps from one tick to the next, against the same made anew at every tick."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.core.strategies.base import InstanceView
from rhymeflow.core.strategies.gains import Class, Gains
from rhymeflow.core.strategies.routing import waterfall
from tests.core.strategies.fleets import SETTINGS, fleet, instance, new, partial

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
