"""Predictions of lengths: the formulas, against slow ones; bounds; what a history is worth."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from math import erfc, exp, log, sqrt
from statistics import fmean

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rhymeflow.core import lengths, line
from rhymeflow.core.lengths import _NOBODY, LengthPredictor, mean_above
from rhymeflow.core.line import Line
from rhymeflow.core.prediction_quality import Prediction, PredictionQuality, spearman
from rhymeflow.core.types import TrajectoryId

LONGEST, MEMBERS = 16_384, 8
NEW = 10**6
"""A group of a prompt never seen, where no other has this number."""

Group = tuple[int, list[int]]
"""A prompt and the lengths of its responses."""


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

    def epoch(self, *, shuffled: bool = False, times: float = 1.0) -> list[Group]:
        """Each prompt once, in any order; `shuffled`: with another prompt's level."""
        if shuffled:
            self.rng.shuffle(self.levels)
        rows = list(range(len(self.levels)))
        self.rng.shuffle(rows)
        return [(row, self.responses(self.levels[row], times)) for row in rows]

    def responses(self, level: float, times: float = 1.0) -> list[int]:
        scores = [sqrt(0.65) * level + sqrt(0.35) * self.rng.gauss(0, 1) for _ in range(MEMBERS)]
        return [min(LONGEST, max(1, round(times * self.shape(z)))) for z in scores]


def predictor(longest: int = LONGEST, members: int = MEMBERS) -> LengthPredictor:
    return LengthPredictor(longest, members, generated=lambda trajectory: 0)


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
        found.quality.metrics(),
    ]


@settings(max_examples=60, deadline=None)
@given(events, st.integers(1, 300), st.integers(1, 5))
def test_expectations_are_in_their_bounds_and_never_fall(events, longest, members):
    found = predictor(longest, members)
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
    quiet, asked = predictor(200, 4), predictor(200, 4)
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


@given(st.permutations(range(24)))
@settings(max_examples=20, deadline=None)
def test_the_order_in_which_a_batch_ends_does_not_matter(order):
    found = []
    for closing in (range(24), order):
        each, rng = predictor(1000, 4), random.Random(3)
        for epoch in (0, 1):
            for group in range(24):
                each.open(100 * epoch + group, group, epoch)
                for member in range(4):
                    each.finished(TrajectoryId(100 * epoch + group, member), rng.randint(1, 900))
            for group in closing:
                each.close(100 * epoch + group)
        each.open(0, 5, 2)
        found.append(answers(each))
    assert found[0] == found[1]


def remembered(monkeypatch, *prompts: tuple[int, int]) -> list[int]:
    """The prompts known after these (epoch, prompt), with room for four; the next to go first."""
    monkeypatch.setattr(lengths, "MAX_PROMPTS", 4)
    found = predictor(members=1)
    for group, (epoch, prompt) in enumerate(prompts):
        found.open(group, prompt, epoch)
        found.finished(TrajectoryId(group, 0), 100)
        found.close(group)
        assert found.expected(NEW)
        assert len(found._prompts) <= 4
    assert not found._open
    assert not found._ended
    return list(found._prompts)


def test_memory_is_bounded_and_part_of_many_prompts_is_always_known(monkeypatch):
    """Forgetting the oldest would know none of eight that come in turn."""
    epochs = [(epoch, prompt) for epoch in range(3) for prompt in range(8)]
    assert remembered(monkeypatch, *epochs) == [0, 1, 2, 3]


def test_a_prompt_that_an_epoch_left_out_makes_room(monkeypatch):
    first, then = [(0, prompt) for prompt in range(4)], [(1, 0), (1, 2), (1, 9), (2, 9)]
    assert remembered(monkeypatch, *first, *then) == [3, 0, 2, 9], "1 was trained on longest ago"


# -- the formulas ----------------------------------------------------------------------------------


def by_grid(prior, variance, within, logs, others, floor) -> float:
    """Where the posterior of a group's level is highest."""

    def score(u: float) -> float:
        above = erfc((floor - u) / sqrt(2 * within)) / 2
        squares = sum((y - u) ** 2 for y in logs)
        censored = others * log(max(above, 1e-300))
        return -((u - prior) ** 2) / (2 * variance) - squares / (2 * within) + censored

    return max((prior - 4 + i / 500 for i in range(6000)), key=score)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(5, 9), max_size=4), st.integers(0, 3), st.floats(4, 9))
def test_a_group_s_level_is_where_the_posterior_is_highest(logs, others, floor):
    """Those that have not finished count as longer than the floor."""
    found = predictor()
    found.open(0, 0, 0)
    for member, y in enumerate(logs):
        found.finished(TrajectoryId(0, member), round(exp(y)))
    group = found._open[0]
    prior, variance = found._prior(group)
    true = by_grid(prior, variance, found._within, group.logs.values(), others, floor)
    level, scale = found._level(group, floor, others)
    assert level == pytest.approx(true, abs=0.03)
    rest = 1 / (1 / variance + len(logs) / found._within)
    assert scale == pytest.approx(sqrt(found._within + rest))


@pytest.mark.parametrize("floor", [-12, -2, 0, 1.5, 6, 29.9, 30.1])
def test_mean_above_a_floor(floor):
    """Of a normal distribution, against a sum."""
    grid = [max(floor, -9) + (i + 0.5) / 1000 for i in range(18_000)]
    weights = [exp((max(floor, 0) ** 2 - y * y) / 2) for y in grid]
    true = sum(w * y for w, y in zip(weights, grid, strict=True)) / sum(weights)
    assert mean_above(floor, 0.0, 1.0) == pytest.approx(true, abs=2e-3)
    assert mean_above(5 + 2 * floor, 5.0, 2.0) == pytest.approx(5 + 2 * true, abs=4e-3)


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=4, max_size=30))
@settings(deadline=None)
def test_a_line_is_the_decayed_least_squares(pairs):
    """Against sums over all pairs; what is as long ago cannot contradict it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line, "FEW", 96.0)
        fitted = Line(*pairs[:4])
        for x, y in pairs[4:]:
            fitted.add(x, y)
    weights = [(1 - 1 / 96) ** (len(pairs) - max(i + 1, 4)) for i in range(len(pairs))]
    total = sum(weights)
    triples = [(w / total, x, y) for w, (x, y) in zip(weights, pairs, strict=True)]
    mean_x, mean_y = sum(w * x for w, x, _ in triples), sum(w * y for w, _, y in triples)
    assert fitted.mean == pytest.approx(mean_y)
    xx = sum(w * (x - mean_x) ** 2 for w, x, _ in triples)
    assume(xx > 1e-3)
    b = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in triples) / xx
    rest = sum(w * (y - mean_y - b * (x - mean_x)) ** 2 for w, x, y in triples)
    shrunk = b - rest / (total - 2) / xx / b if b > 1e-6 else 0.0
    slope = min(1.0, max(0.0, shrunk))
    assert fitted.slope == pytest.approx(slope, abs=1e-4)
    assert fitted.at(mean_x + 1) == pytest.approx(mean_y + slope, abs=1e-4)
    left = sum(w * (y - mean_y - slope * (x - mean_x)) ** 2 for w, x, y in triples)
    assert fitted.left == pytest.approx(left, abs=1e-3)


def test_the_shape_is_that_of_the_last_responses():
    """Quantiles and means beyond a floor, against counting: two modes, one member a group."""
    rng, found = random.Random(1), predictor(members=1)
    seen = [round(bimodal(rng.gauss(0, 1))) for _ in range(1200)]
    play(found, [(row, [length]) for row, length in enumerate(seen)], 0, batch=1200)
    seen = seen[-1024:]
    for made in (0, 500, 2000, 6000):
        assert found.expected(NEW, made) == pytest.approx(
            fmean(length for length in seen if length > made), rel=0.1
        )
    for q in (0.1, 0.5, 0.72, 0.8, 0.9):
        share = sum(length <= found.quantile(NEW, q) for length in seen) / len(seen)
        assert share == pytest.approx(q, abs=0.02)


def test_a_prompt_is_remembered_by_epoch_and_shrunk_to_the_mean():
    found = trained(World(), 1)
    for group, (epoch, length) in enumerate([(0, 100), (2, 5000), (1, 9000)], NEW):
        found.open(group, NEW, epoch)
        for member in range(MEMBERS):
            found.finished(TrajectoryId(group, member), length)
        found.close(group)
    found.open(0, NEW, 3)
    doubt = found._within / found._prior(_NOBODY)[1]
    weight = MEMBERS * (0.25 + 1 + 1)  # what comes late counts with the epoch that is there
    total = MEMBERS * (0.25 * log(100) + log(5000) + log(9000))
    mean = found._unseen.mean
    assert found._open[0].x == pytest.approx((total + doubt * mean) / (weight + doubt))


def test_before_anything_has_ended_a_quarter_of_the_longest():
    assert predictor(40_960).expected(0) == pytest.approx(10_240, rel=0.1)


# -- siblings --------------------------------------------------------------------------------------


def test_who_finishes_first_is_short():
    """What survivors have left, without bias whatever part of the group has finished."""
    world = World(prompts=384)
    found, results = trained(world, 1), {"none": [0.0, 0], "few": [0.0, 0], "most": [0.0, 0]}
    for group, (_, members) in enumerate(World(prompts=1500).epoch(), NEW):
        found.open(group, group, 1)
        ordered = sorted(members)
        for made in (300, 1000, 2500):
            num = sum(length <= made for length in ordered)
            for member, length in enumerate(ordered[:num]):
                found.finished(TrajectoryId(group, member), length)
            stage = results["none" if not num else "few" if 2 * num < MEMBERS else "most"]
            stage[0] += (MEMBERS - num) * (found.expected(group, made) - made)
            stage[1] += sum(length - made for length in ordered[num:])
    ratios = {name: expected / true for name, (expected, true) in results.items()}
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), abs=0.15)


def test_a_group_that_ended_early_is_remembered_as_longer_than_what_finished():
    expected = []
    for finished in (4, MEMBERS):
        found = trained(World(), 1)
        found.open(NEW, NEW, 0)
        for member in range(finished):
            found.finished(TrajectoryId(NEW, member), 5000 + member)
        found.close(NEW)
        found.open(NEW + 1, NEW, 1)
        expected.append(found.expected(NEW + 1))
    assert expected[0] > expected[1]


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
    metrics = found.quality.metrics()
    assert metrics["lengths/rank_correlation"] > 0.65
    assert metrics["lengths/coverage"] == pytest.approx(0.8, abs=0.08)
    assert metrics["lengths/seen_prompt_share"] == 1


def test_prompts_that_say_nothing():
    world, found, said = World(prompts=96), predictor(), []
    for epoch in range(6):
        groups = [(row, world.responses(0.0)) for row in range(96)]
        play(found, groups, epoch, batch=8)
        said.append(found.explained_variance)
    assert max(said) < 0.02
    metrics = found.quality.metrics()
    assert metrics["lengths/explained_variance"] == said[-1]
    assert metrics["lengths/coverage"] == pytest.approx(0.8, abs=0.06)


def test_a_history_that_is_no_longer_true_and_then_is_again():
    world = World()
    found = trained(world, 3)
    assert found.explained_variance > 0.4
    assert found._seen.slope > 0.8
    shuffled = world.epoch(shuffled=True)
    play(found, shuffled[:32], 3, batch=8)
    assert found.explained_variance < 0.1
    assert found._seen.slope < 0.3
    play(found, shuffled[32:], 3, batch=8)
    assert found.explained_variance < 0.03
    for epoch in (4, 5):
        play(found, world.epoch(), epoch, batch=8)
    assert found.explained_variance > 0.4


def test_all_lengths_double():
    world = World()
    found = trained(world, 2)
    results = play(found, world.epoch(times=2.0), 2, batch=8)
    first, later = results[:64], results[24 * MEMBERS : 56 * MEMBERS]
    assert fmean(t[0] for t in first) / fmean(t[3] for t in first) < 0.75
    assert fmean(t[0] for t in later) / fmean(t[3] for t in later) == pytest.approx(1, abs=0.15)
    assert found._seen.slope > 0.8, "what it says of differences is as true as before"


# -- quality ---------------------------------------------------------------------------------------


def test_metrics_are_of_what_was_predicted():
    quality = PredictionQuality()
    assert quality.metrics() == {"lengths/explained_variance": 0.0}
    for i in range(40):  # every second prompt was seen; a quarter is out of the interval
        low = 0.0 if i % 4 else 9.0
        quality.add(Prediction(i % 2 == 0, 3.0, 2.5, low, 10.0), [2.0 + i / 100])
        if i == 30:
            assert len(quality.metrics()) == 1, "too few"
    left, total = (
        sum((1 - 1 / 256) ** (39 - i) * (2.0 + i / 100 - guess) ** 2 for i in range(40))
        for guess in (2.5, 3.0)
    )
    assert quality.metrics() == {
        "lengths/explained_variance": pytest.approx(1 - left / total),
        "lengths/coverage": 0.75,
        "lengths/seen_prompt_share": 0.5,
    }, "too few were seen for a rank correlation"
    for i in range(40):
        quality.add(Prediction(True, 3.0, 2.0 + i, 0.0, 10.0), [2.0 + i / 100])
    assert quality.metrics()["lengths/rank_correlation"] > 0.5


def test_rank_correlation():
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert spearman([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)
    assert spearman([1, 1, 2, 2], [1, 2, 3, 4]) == pytest.approx(0.894427, abs=1e-6)
    assert spearman([1, 1, 1], [1, 2, 3]) is None
