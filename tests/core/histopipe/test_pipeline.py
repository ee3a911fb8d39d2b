"""Which step a group belongs to, where it is laid out, and what becomes of that."""

from collections import Counter

import pytest

from rhymeflow.core.histopipe.layout import Share
from rhymeflow.core.histopipe.pipeline import Pipeline, Place
from rhymeflow.core.types import TrajectoryId

ABC = ("a", "b", "c")


def planned(*, steps: int = 1) -> Pipeline:
    """Groups 0 and 1 for one instance, 2 and 3 for two; the next step has groups 10 to 13, ..."""
    made = Pipeline()
    for step in range(steps):
        first = 10 * step
        shares = [Share((first, first + 1), 1), Share((first + 2, first + 3), 2)]
        made.add_step(shares, ABC)
    return made


def where(pipeline: Pipeline, group: int, members: int = 4) -> list[Place | None]:
    return [pipeline.place(TrajectoryId(group, member)) for member in range(members)]


def names(pipeline: Pipeline, group: int) -> set[str]:
    return {place.instance for place in where(pipeline, group) if place is not None}


def test_members_are_dealt_out_over_their_share():
    made = planned()
    assert where(made, 0) == [Place(0, "a")] * 4
    assert (
        Counter(where(made, 2)) == Counter(where(made, 3)) == {Place(0, "b"): 2, Place(0, "c"): 2}
    )
    assert {where(made, group, 1)[0] for group in (2, 3)} == {Place(0, "b"), Place(0, "c")}
    assert [group in made for group in (0, 3, 4)] == [True, True, False]
    assert made.place(TrajectoryId(4, 0)) is None


def test_every_other_step_runs_the_other_way():
    made = planned(steps=3)
    assert made.num_steps == 3
    assert [names(made, group) for group in (0, 10, 20)] == [{"a"}, {"c"}, {"a"}]
    assert [names(made, group) for group in (2, 12, 22)] == [{"b", "c"}, {"a", "b"}, {"b", "c"}]
    assert [place.step for place in where(made, 22) if place] == [2] * 4


def test_what_moves_has_a_place_of_its_own():
    made = planned(steps=2)
    moved, put_off, beside = (TrajectoryId(0, member) for member in range(3))
    made.move([moved], "c", later=False)
    made.move([put_off], "a", later=True)
    assert made.place(moved) == Place(0, "c")
    assert made.place(put_off) == Place(1, "a")
    assert made.place(beside) == Place(0, "a")
    assert [made.has_moved(t) for t in (moved, put_off, beside)] == [True, True, False]
    assert made.step([put_off]) == 1, "it does not keep its instance from the next step"
    with pytest.raises(AssertionError, match="not laid out"):
        made.move([TrajectoryId(99, 0)], "a", later=False)


def test_what_was_laid_out_on_one_that_left_goes_to_the_others():
    made = planned()
    made.move([TrajectoryId(2, 0)], "a", later=True)
    made.replace_lost({"b", "d"})
    assert names(made, 0) == {"b", "d"}, "its only instance left"
    assert names(made, 3) == {"b"}, "one of its instances left"
    assert made.place(TrajectoryId(2, 0)) == Place(1, "b")
    assert (made.share("a"), made.share("b")) == (0.0, 1.0)
    before = [where(made, group) for group in range(4)]
    made.replace_lost({"b", "d", "e"})
    assert [where(made, group) for group in range(4)] == before, "who comes takes nothing away"
