"""The level of a group, against sums over a fine grid; distributions, against plain counting."""

from __future__ import annotations

import random
from math import erfc, exp, inf, log, sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.core.lengths.hindsight import Hindsight, spearman
from rhymeflow.core.lengths.residuals import Residuals, exponential_points
from rhymeflow.core.lengths.siblings import level


def highest(prior, variance, noise, lengths, unfinished, floor) -> float:
    """Where the posterior of the level is highest, by trying a grid."""

    def score(u: float) -> float:
        tail = erfc((floor - u) / sqrt(2 * noise)) / 2
        return (
            -((u - prior) ** 2) / (2 * variance)
            - sum((y - u) ** 2 for y in lengths) / (2 * noise)
            + unfinished * log(max(tail, 1e-300))
        )

    grid = [prior - 4 + i / 500 for i in range(6000)]
    return max(grid, key=score)


@settings(max_examples=40, deadline=None)
@given(
    st.floats(3, 8), st.floats(0.1, 1), st.floats(0.1, 1),
    st.lists(st.floats(3, 8), max_size=4), st.integers(1, 8), st.floats(2, 9),
)  # fmt: skip
def test_the_level_is_where_the_posterior_is_highest(
    prior, variance, noise, lengths, unfinished, floor
):
    found, rest = level(prior, variance, noise, sum(lengths), len(lengths), unfinished, floor)
    assert found == pytest.approx(
        highest(prior, variance, noise, lengths, unfinished, floor), abs=0.005
    )
    higher, less = level(prior, variance, noise, sum(lengths), len(lengths), unfinished, floor + 1)
    assert found - 1e-9 <= higher <= found + 1 + 1e-5
    assert 0 < less <= rest * (1 + 1e-6)
    assert rest <= variance * (1 + 1e-6)


def test_without_others_it_is_the_mean_weighted_by_precision():
    found, rest = level(5.0, 0.5, 0.25, 4.0 + 6.0, 2)
    assert found == pytest.approx((5.0 / 0.5 + 10.0 / 0.25) / (1 / 0.5 + 2 / 0.25))
    assert rest == pytest.approx(1 / (1 / 0.5 + 2 / 0.25))
    assert level(5.0, 0.5, 0.25, 10.0, 2, 3, -inf) == (found, rest)


@pytest.mark.parametrize("draw", ["gauss", "two modes", "exponential"])
def test_means_and_quantiles_are_those_of_what_was_seen(draw):
    rng = random.Random(1)
    draws = {
        "gauss": lambda: rng.gauss(0, 0.6),
        "two modes": lambda: rng.gauss(0, 0.2) + 1.5 * (rng.random() < 0.3),
        "exponential": lambda: rng.expovariate(3),
    }
    seen = [draws[draw]() for _ in range(1000)]
    residuals = Residuals(seen)
    for floor in (-inf, -0.3, 0.2, 0.8):
        rest = [6 + r for r in seen if r > floor]
        true = sum(min(2000.0, exp(y)) for y in rest) / len(rest)
        assert residuals.mean(6.0, 1.0, 6 + floor, 2000.0) == pytest.approx(true, rel=0.03)
        for q in (0.1, 0.5, 0.9):
            value = residuals.quantile(q, floor)
            share = sum(r <= value for r in seen if r > floor) / len(rest)
            assert share == pytest.approx(q, abs=0.03)


def test_what_is_expected_beforehand_fades():
    expected = [log(1000.0)]
    means = [
        Residuals([log(100.0)] * n, expected, trust=4).mean(0, 1, -inf, 10**6) for n in (0, 4, 64)
    ]
    assert means[0] == pytest.approx(1000)
    assert 400 < means[1] < 600
    assert means[2] == pytest.approx(100, rel=0.05)


def test_points_of_the_prior_have_its_mean():
    points = exponential_points(1024)
    assert points == sorted(points)
    assert sum(exp(p) for p in points) / len(points) == pytest.approx(1024)


def test_rank_correlation():
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert spearman([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)
    assert spearman([1, 1, 2, 2], [1, 2, 3, 4]) == pytest.approx(0.894427, abs=1e-6)
    assert spearman([1, 1, 1], [1, 2, 3]) is None


def test_few_responses_say_nothing_of_calibration():
    hindsight = Hindsight()
    for i in range(40):
        hindsight.add(i % 2 == 0, float(i), 10 + i, i % 4 != 0)
        if i == 30:
            assert hindsight.calibration(0.0).metrics() == {"lengths/skill": 0.0}
    assert hindsight.calibration(0.5).metrics() == {
        "lengths/coverage": 0.75,
        "lengths/known": 0.5,
        "lengths/skill": 0.5,
    }, "too few had a history for a rank correlation"
    for i in range(40, 80):
        hindsight.add(i % 2 == 0, float(i), 10 + i, i % 4 != 0)
    assert hindsight.calibration(0.5).rank_correlation == pytest.approx(1)
