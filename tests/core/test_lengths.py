"""Predictions of lengths: bounds under any events, the means, what a history is worth."""

import random
from collections.abc import Callable, Iterable
from math import exp, log, sqrt
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.core import lengths
from rhymeflow.core.lengths import LengthPredictor, spearman
from rhymeflow.core.types import TrajectoryId

LONGEST, MEMBERS = 16_384, 8
NEW = 10**6  # a group of a prompt never seen, where no other has this number

Group = tuple[int, list[int]]  # a prompt and the lengths of its responses


def lognormal(z: float) -> float:
    return exp(7.2 + 0.8 * z)


def bimodal(z: float) -> float:
    """A quarter of the responses think six times as long."""
    return exp(6.8 + 0.4 * z) * (6 if z > 0.674 else 1)


class World:
    """Prompts with levels that explain 65% of the variance of the scores of their responses."""

    def __init__(self, shape: Callable[[float], float] = lognormal, prompts: int = 192) -> None:
        self.shape, self.rng = shape, random.Random(0)
        self.levels = [self.rng.gauss(0, 1) for _ in range(prompts)]

    def epoch(self, *, shuffled: bool = False) -> list[Group]:
        """Each prompt once, in any order; `shuffled`: with another prompt's level."""
        if shuffled:
            self.rng.shuffle(self.levels)
        rows = list(range(len(self.levels)))
        self.rng.shuffle(rows)
        return [(row, self.responses(self.levels[row])) for row in rows]

    def responses(self, level: float) -> list[int]:
        scores = [sqrt(0.65) * level + sqrt(0.35) * self.rng.gauss(0, 1) for _ in range(MEMBERS)]
        return [min(LONGEST, max(1, round(self.shape(z)))) for z in scores]


def predictor(longest: int = LONGEST) -> LengthPredictor:
    return LengthPredictor(longest, generated=lambda trajectory: 0)


def play(found: LengthPredictor, groups: Iterable[Group], epoch: int, batch: int = 16) -> list:
    """Tell of groups, a batch at a time; (expected, q10, q90, length) of each response."""
    groups, results = list(groups), []
    for first in range(0, len(groups), batch):
        part = dict(enumerate(groups[first : first + batch], 1000 * epoch + first))
        for group, (row, _) in part.items():
            found.open(group, row, epoch)
        for group, (_, known) in part.items():
            low, high = found.quantile(group, 0.1), found.quantile(group, 0.9)
            results += [(found.expected(group), low, high, length) for length in known]
        for group, (_, known) in part.items():
            for member, length in enumerate(known):
                found.finished(TrajectoryId(group, member), length)
        for group in part:
            found.close(group)
    return results


def trained(world: World, epochs: int) -> LengthPredictor:
    found = predictor()
    for epoch in range(epochs):
        play(found, world.epoch(), epoch)
    return found


# -- any events in any order ----------------------------------------------------------------------

groups = st.integers(0, 5)
events = st.lists(
    st.one_of(
        st.tuples(st.just("open"), groups, st.integers(0, 2), st.integers(0, 3)),
        st.tuples(st.just("finished"), groups, st.integers(0, 3), st.integers(1, 300)),
        st.tuples(st.just("close"), groups),
    ),
    max_size=120,
)


def tell(found: LengthPredictor, event: tuple) -> None:
    kind, group, *rest = event
    match kind:
        case "open":
            found.open(group, *rest)
        case "finished":
            found.finished(TrajectoryId(group, rest[0]), rest[1])
        case "close":
            found.close(group)


def answers(found: LengthPredictor) -> list:
    return [
        *(found.expected(group, made) for group in range(7) for made in (0, 1, 7, 60, 199)),
        *(found.quantile(group, q) for group in range(7) for q in (0.1, 0.9)),
        found.metrics(),
    ]


@settings(max_examples=60, deadline=None)
@given(events, st.integers(1, 300))
def test_expectations_are_in_their_bounds_and_never_fall(events, longest):
    found = predictor(longest)
    for event in events:
        tell(found, event)
    for group in range(7):
        before = 0.0
        for made in range(0, longest, max(1, longest // 40)):
            expected = found.expected(group, made)
            assert made < expected <= longest
            assert expected >= before - 1e-9
            before = expected
        assert found.expected(group, longest) == longest
        quantiles = [found.quantile(group, q) for q in (0, 0.1, 0.5, 0.9, 1)]
        assert quantiles == sorted(quantiles)
        assert 1 <= quantiles[0] <= quantiles[-1] <= longest
    assert 0 <= found.explained_variance <= 1


@settings(max_examples=40, deadline=None)
@given(events, st.randoms(use_true_random=False))
def test_asking_changes_nothing_and_neither_does_a_fact_told_twice(events, rng):
    quiet, asked = predictor(200), predictor(200)
    for event in events:
        tell(quiet, event)
        tell(asked, event)
        tell(asked, event)
        if event[0] == "finished":  # once more, with another length
            asked.finished(TrajectoryId(event[1], event[2]), 1)
        if rng.random() < 0.3 and event[0] != "close":
            asked.expected(rng.randrange(7), rng.randrange(200))
            asked.quantile(rng.randrange(7), rng.random())
    assert answers(asked) == answers(quiet)


def remembered(monkeypatch, *prompts: tuple[int, int]) -> list[int]:
    """The prompts known after these (epoch, prompt), with room for four; the next to go first."""
    monkeypatch.setattr(lengths, "MAX_PROMPTS", 4)
    found = predictor()
    for group, (epoch, prompt) in enumerate(prompts):
        found.open(group, prompt, epoch)
        found.finished(TrajectoryId(group, 0), 100)
        found.close(group)
        assert found.expected(NEW)
        assert len(found._prompts) <= 4
    assert not found._open
    return list(found._prompts)


def test_memory_is_bounded_and_part_of_many_prompts_is_always_known(monkeypatch):
    """Forgetting the oldest would know none of eight that come in turn."""
    epochs = [(epoch, prompt) for epoch in range(3) for prompt in range(8)]
    assert remembered(monkeypatch, *epochs) == [0, 1, 2, 3]


def test_a_prompt_that_an_epoch_left_out_makes_room(monkeypatch):
    first, then = [(0, prompt) for prompt in range(4)], [(1, 0), (1, 2), (1, 9), (2, 9)]
    assert remembered(monkeypatch, *first, *then) == [3, 0, 2, 9], "1 was trained on longest ago"


# -- the means -------------------------------------------------------------------------------------


def test_a_level_is_of_what_the_prompt_did_as_far_as_that_tells_and_of_the_group():
    """An epoch counts half as much as the next; what comes late, with the epoch that is there."""
    found = trained(World(), 2)
    for epoch, length in (0, 100), (2, 5000), (1, 9000):
        play(found, [(NEW, [length] * MEMBERS)], epoch)
    weight, within = MEMBERS * (0.25 + 1 + 1), found._within.mean
    total = MEMBERS * (0.25 * log(100) + log(5000) + log(9000))
    overall, doubt = found._overall.mean, within / found._between.mean
    recurring = found._recurring
    num, xx, xy, yy = recurring.count, recurring.xx, recurring.xy, recurring.yy
    slope, left = recurring.shrunk_slope, (yy - xy**2 / xx) / num
    assert slope == pytest.approx(xy / xx - left / xy)
    assert 0.6 < slope < 1
    prior = overall + slope * (total - weight * overall) / (doubt + weight)
    left = (yy - 2 * slope * xy + slope**2 * xx) / num
    found.open(0, NEW, 3)
    points = found._points
    middle = points[len(points) // 2]
    assert found.quantile(0, 0.5) == pytest.approx(exp(prior + sqrt(within + left) * middle))
    found.finished(TrajectoryId(0, 2), 700)
    level = (prior / left + log(700) / within) / (1 / left + 1 / within)
    scale = sqrt(within + 1 / (1 / left + 1 / within))
    assert found.quantile(0, 0.5) == pytest.approx(exp(level + scale * middle))
    expected = fmean(min(LONGEST, exp(level + scale * z)) for z in points)
    assert found.expected(0) == pytest.approx(expected)
    unknown = overall + sqrt(within + found._between.mean) * middle
    assert found.quantile(1, 0.5) == pytest.approx(exp(unknown))


def test_the_shape_is_that_of_the_last_responses():
    """Quantiles and means beyond a floor, against counting: two modes."""
    rng, found = random.Random(1), predictor()
    seen = [round(bimodal(rng.gauss(0, 1))) for _ in range(2000)]
    groups = [seen[i : i + MEMBERS] for i in range(0, len(seen), MEMBERS)]
    play(found, list(enumerate(groups)), 0, batch=len(groups))
    seen = seen[-1024:]
    for made in (0, 500, 2000, 6000):
        assert found.expected(NEW, made) == pytest.approx(
            fmean(length for length in seen if length > made), rel=0.1
        )
    for q in (0.1, 0.5, 0.72, 0.8, 0.9):
        share = sum(length <= found.quantile(NEW, q) for length in seen) / len(seen)
        assert share == pytest.approx(q, abs=0.03)


def test_before_anything_has_ended_a_quarter_of_the_longest():
    assert predictor(40_960).expected(0) == pytest.approx(10_240, rel=0.1)


def test_what_remains_is_of_what_is_generated():
    found = trained(World(), 1)
    found.generated = lambda trajectory: 700 * trajectory.member
    for member in (0, 1, 3):
        expected = found.expected(NEW, 700 * member)
        assert found.remaining(TrajectoryId(NEW, member)) == expected - 700 * member
    found.generated = lambda trajectory: LONGEST
    assert found.remaining(TrajectoryId(NEW, 0)) == 1


# -- what a history is worth -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [lognormal, bimodal])
def test_an_informative_history(shape):
    """Two epochs know a level nearly; it explains 65% of the variance of scores."""
    world = World(shape)
    found = trained(world, 2)
    results = play(found, world.epoch(), 2)
    known = [length for *_, length in results]
    assert spearman([expected for expected, *_ in results], known) > 0.7
    covered = [low <= length <= high for _, low, high, length in results]
    assert fmean(covered) == pytest.approx(0.8, abs=0.06)
    assert fmean(t[0] for t in results) / fmean(known) == pytest.approx(1, abs=0.15)
    assert found.explained_variance == pytest.approx(0.6, abs=0.12)
    assert found.metrics()["lengths/rank_correlation"] > 0.65


@pytest.mark.parametrize("level", ["of no prompt", "of another prompt"])
def test_a_history_that_says_nothing(level):
    """Rules that use lengths ask whether history explains anything."""
    world, found = World(prompts=96), predictor()
    for epoch in range(4):
        groups = [(row, world.responses(0.0)) for row in range(96)]
        play(found, groups if level == "of no prompt" else world.epoch(shuffled=True), epoch)
    assert found.explained_variance < 0.02


def test_rank_correlation():
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert spearman([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)
    assert spearman([1, 1, 2, 2], [1, 2, 3, 4]) == pytest.approx(0.894427, abs=1e-6)
    assert spearman([1, 1, 1], [1, 2, 3]) is None
