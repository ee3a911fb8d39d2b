"""Iteration times learned from noisy ones, against the formulas they were made from."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.histospec.iteration_time import IterationTime, bin_of

K1 = 2e-8


def predict(timing: IterationTime, n: int, d: int, o: int, kv_tokens: int) -> float:
    """Seconds of an iteration of n sequences, d drafted tokens, o rows of prompts."""
    return float(timing.seconds(n, o, kv_tokens, d)[d])


def formula(n: int, d: int, o: int, kv_tokens: int) -> float:
    """k1 K + max(k2, k3 rows + c) + k4: flat, then steep (StaleFlow, section on the cost model)."""
    return K1 * kv_tokens + max(2e-3, 2.5e-5 * (n + d + o) + 2e-4) + 1e-3


def steps(n: int, d: int, o: int, kv_tokens: int) -> float:
    """A CPU's matrix products: as long for 1 row as for 16."""
    return K1 * kv_tokens + 1e-3 + 4e-4 * math.ceil((n + d + o) / 16)


def kinds(n: int, d: int, o: int, kv_tokens: int) -> float:
    """A sequence is dearer than a drafted token, and that than a prompt's row."""
    return K1 * kv_tokens + 2e-3 + 5e-5 * n + 2e-5 * d + 1e-5 * o


def learned(truth, *, seed: int, iterations: int = 1500) -> IterationTime:
    """What is learned from iterations with noise of 8%, of which one in fifty is held up."""
    chance = np.random.default_rng(seed)
    timing = IterationTime()
    for _ in range(iterations):
        n, kv = int(chance.integers(1, 64)), int(chance.integers(1_000, 60_000))
        d = int(n * chance.integers(0, 6))
        o = int(chance.integers(0, 2)) * 64
        held_up = 10 if chance.random() < 0.02 else 1
        seconds = truth(n, d, o, kv) * held_up * (1 + 0.08 * chance.standard_normal())
        timing.observe(n, d, o, kv, seconds)
    return timing


@pytest.mark.parametrize("truth", [formula, steps, kinds])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_predictions_within_what_was_seen(truth, seed: int) -> None:
    timing = learned(truth, seed=seed)
    errors = np.array([
        predict(timing, n, d * n, o, kv) / truth(n, d * n, o, kv) - 1
        for n in range(4, 64, 7)
        for d in range(5)
        for o in (0, 64)
        for kv in (2_000, 20_000, 60_000)
    ])  # fmt: skip
    assert np.abs(errors).mean() < 0.08
    assert np.abs(errors).max() < 0.4


def test_kinds_of_rows_have_prices_of_their_own() -> None:
    prices = learned(kinds, seed=0).prices
    assert prices[0] == pytest.approx(2e-3, rel=0.2)
    assert prices[1:4] == pytest.approx([5e-5, 2e-5, 1e-5], rel=0.25)
    assert prices[4] == pytest.approx(K1, rel=0.25)


def test_iterations_with_prompts_teach_what_those_without_cost() -> None:
    chance = np.random.default_rng(0)
    timing = IterationTime()
    for _ in range(200):
        n, o = int(chance.integers(20, 33)), int(chance.integers(1, 8)) * 16
        timing.observe(n, 0, o, 500, 0.02 + 1.2e-3 * n + 6e-4 * o)
    assert predict(timing, 32, 0, 0, 500) == pytest.approx(0.02 + 1.2e-3 * 32, rel=0.05)


def test_a_few_iterations_with_drafts_say_what_they_cost() -> None:
    timing = IterationTime()
    assert not timing.is_known
    for _ in range(4):
        timing.observe(64, 0, 0, 100, 0.100)
    assert timing.is_known
    before = timing.doubt
    assert predict(timing, 64, 64, 0, 100) < 0.12
    for _ in range(2):
        timing.observe(64, 32, 0, 100, 0.150)
    assert timing.doubt < before / 1.5
    assert predict(timing, 64, 64, 0, 100) == pytest.approx(0.20, rel=0.1)
    assert predict(timing, 64, 0, 0, 100) == pytest.approx(0.10, rel=0.05)


def test_an_iteration_that_was_held_up_moves_little() -> None:
    timing = IterationTime()
    for _ in range(20):
        timing.observe(8, 0, 0, 100, 0.004)
    timing.observe(8, 0, 0, 100, 4.0)
    assert predict(timing, 8, 0, 0, 100) == pytest.approx(0.004, rel=0.05)


def test_a_machine_that_became_slower_is_noticed() -> None:
    timing = IterationTime()
    for _ in range(200):
        timing.observe(8, 0, 0, 100, 0.004)
    for _ in range(20):
        timing.observe(8, 0, 0, 100, 0.006)
    assert predict(timing, 8, 0, 0, 100) == pytest.approx(0.006, rel=0.05)


counts = st.integers(0, 2000)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 500), counts, counts, st.integers(0, 10_000), st.floats(1e-4, 10.0)
        ),
        min_size=1,
        max_size=60,
    ),
    st.integers(1, 500),
    counts,
)
def test_times_are_positive_and_never_fall_with_rows(iterations, n: int, o: int) -> None:
    timing = IterationTime()
    for iteration in iterations:
        timing.observe(*iteration)
    assert (timing.prices >= 0).all()
    assert timing.doubt >= 0
    times = timing.seconds(n, o, 5_000, 6000)
    assert times[0] > 0
    assert (np.diff(times) >= -1e-12).all()


@given(st.integers(1, 10**9))
def test_bins_are_in_order(rows: int) -> None:
    assert 0 <= bin_of(rows) <= bin_of(rows + 1)


def test_a_price_that_was_met_once_when_all_was_slow_is_doubted() -> None:
    """Else one bad iteration would end drafting for good: what is too dear is not tried again."""
    model = IterationTime()
    for _ in range(30):
        model.observe(4, 0, 0, 0, 0.002)
    model.observe(4, 4, 0, 0, 0.02)
    dear = model.prices[2]
    assert dear > 0.0001
    for _ in range(6):
        model.doubt_drafted()
    assert model.prices[2] < dear / 3
    assert predict(model, 4, 0, 0, 0) == pytest.approx(0.002, rel=0.1)


def test_what_was_met_often_is_not_forgotten_at_once() -> None:
    model = IterationTime()
    for i in range(60):
        drafted = 4 * (i % 3)
        model.observe(4, drafted, 0, 0, 0.002 + 0.0005 * drafted)
    model.doubt_drafted()
    assert predict(model, 4, 8, 0, 0) == pytest.approx(0.006, rel=0.1)
