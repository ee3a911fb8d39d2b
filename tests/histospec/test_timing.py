"""Iteration times learned from noisy ones, against the formulas they were made from."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.histospec.timing import IterationTime, bin_of

K1 = 2e-8


def formula(rows: int, kv_tokens: int) -> float:
    """k1 K + max(k2, k3 n + c) + k4: flat, then steep (StaleFlow, section on the cost model)."""
    return K1 * kv_tokens + max(2e-3, 2.5e-5 * rows + 2e-4) + 1e-3


def steps(rows: int, kv_tokens: int) -> float:
    """A CPU's matrix products: as long for 1 row as for 16."""
    return K1 * kv_tokens + 1e-3 + 4e-4 * math.ceil(rows / 16)


def learned(truth, *, seed: int, rows: tuple[int, int], iterations: int = 1500) -> IterationTime:
    """What is learned from iterations with noise of 8%, of which one in fifty is held up."""
    chance = np.random.default_rng(seed)
    timing = IterationTime()
    for _ in range(iterations):
        n, kv = int(chance.integers(*rows)), int(chance.integers(1_000, 60_000))
        held_up = 10 if chance.random() < 0.02 else 1
        timing.observe(n, kv, truth(n, kv) * held_up * (1 + 0.08 * chance.standard_normal()))
    return timing


@pytest.mark.parametrize("truth", [formula, steps])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_predictions_within_what_was_seen(truth, seed: int) -> None:
    timing = learned(truth, seed=seed, rows=(1, 400))
    errors = np.array([
        timing.predict(n, kv) / truth(n, kv) - 1
        for n in range(8, 400, 7)
        for kv in (2_000, 20_000, 60_000)
    ])  # fmt: skip
    assert np.abs(errors).mean() < 0.05
    assert np.abs(errors).max() < 0.3
    assert timing.kv_slope == pytest.approx(K1, rel=0.3)


def test_a_few_more_rows_than_were_seen_are_hoped_to_be_cheap_and_many_are_not() -> None:
    timing = IterationTime()
    assert not timing.is_known
    timing.observe(100, 0, 0.010)
    assert timing.predict(100, 0) == pytest.approx(0.010)
    assert 0.010 < timing.predict(150, 0) < 0.0105
    assert timing.predict(1500, 0) == pytest.approx(0.10, rel=0.05)
    assert 0.004 < timing.predict(1, 0) < 0.008


def test_hope_ends_with_the_first_few_iterations() -> None:
    timing = IterationTime()
    for rows, seconds in [(100, 0.010), (150, 0.015)]:
        for _ in range(3):
            timing.observe(rows, 0, seconds)
    assert timing.predict(150, 0) == pytest.approx(0.015)
    assert timing.predict(125, 0) == pytest.approx(0.0125)


def test_a_first_iteration_of_so_many_rows_that_was_held_up_is_not_believed() -> None:
    timing = IterationTime()
    for _ in range(10):
        timing.observe(100, 0, 0.010)
    timing.observe(120, 0, 0.500)
    assert timing.predict(120, 0) <= 0.0121


def test_an_iteration_that_was_held_up_moves_nothing() -> None:
    timing = IterationTime()
    for _ in range(20):
        timing.observe(8, 100, 0.004)
    timing.observe(8, 100, 4.0)
    assert timing.predict(8, 100) == pytest.approx(0.004)


def test_a_machine_that_became_slower_is_noticed() -> None:
    timing = IterationTime()
    for _ in range(200):
        timing.observe(8, 100, 0.004)
    for _ in range(20):
        timing.observe(8, 100, 0.006)
    assert timing.predict(8, 100) == pytest.approx(0.006)


@given(
    st.lists(
        st.tuples(st.integers(1, 5000), st.integers(0, 10_000), st.floats(1e-4, 10.0)),
        min_size=1,
        max_size=60,
    )
)
def test_times_are_positive_and_never_fall_with_rows(iterations) -> None:
    timing = IterationTime()
    for iteration in iterations:
        timing.observe(*iteration)
    curve = timing.curve(5_000)
    times = [curve.at(rows) for rows in range(1, 6000, 13)]
    assert times[0] > 0
    assert (np.diff(times) >= -1e-12).all()


@given(st.integers(1, 10**9))
def test_bins_are_in_order(rows: int) -> None:
    assert 0 <= bin_of(rows) <= bin_of(rows + 1)
