"""The fit finds the coefficients that made the timings, whichever side of the kink they are on."""

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rhymeflow.calibration.fit import (
    DecodeFit,
    DecodeTiming,
    errors,
    fit_decode,
    fit_line,
    nonnegative,
)
from rhymeflow.core.cost import CostModel

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
LENGTHS = (30, 120, 300, 450)


def timings(k1, k2, k3, c, k4, sizes=SIZES, noise=0.0, seed=0):
    """Timings that the cost model makes, each off by up to `noise` of itself."""
    cost = CostModel(
        k1,
        k2,
        k3,
        c,
        k4,
        prefill_token=0,
        train_token=0,
        measure_token=0,
        train_step=0,
        push=0,
        pull=0,
    )
    chance = random.Random(seed)
    return [
        DecodeTiming(
            n, n * length, cost.iteration(n, n * length) * chance.uniform(1 - noise, 1 + noise)
        )
        for n in sizes
        for length in LENGTHS
    ]


def off(fit, found):
    return errors([fit.seconds(n, kv) for n, kv, _ in found], [seconds for *_, seconds in found])


@settings(max_examples=40, deadline=None)
@example(k1=1e-6, kink=4.5, k3=6.8445e-4, c=2**-7, k4=0.0)  # a kink between two coarse places
@given(
    k1=st.floats(1e-8, 1e-6),
    kink=st.floats(4, 100),
    k3=st.floats(1e-5, 1e-3),
    c=st.floats(1e-4, 1e-1),
    k4=st.floats(0, 1e-2),
)
def test_exact_timings_are_met(k1, kink, k3, c, k4):
    found = timings(k1, k3 * kink + c, k3, c, k4)
    fit = fit_decode(found)
    assert off(fit, found).mean < 1e-3  # kinks are tried 1/64 of a trajectory apart
    assert fit.k1 == pytest.approx(k1, rel=0.05, abs=2e-3 * (k3 * kink + c + k4) / 450)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), kink=st.floats(8, 90))
def test_noise_is_averaged_out(seed, kink):
    k1, k3, c = 2e-7, 5e-5, 1e-3
    fit = fit_decode(timings(k1, k3 * kink + c, k3, c, 0.0, noise=0.05, seed=seed))
    truth = timings(k1, k3 * kink + c, k3, c, 0.0)
    assert off(fit, truth).mean < 0.03
    assert fit.k1 == pytest.approx(k1, rel=0.2)


@pytest.mark.parametrize("name", ["7B", "14B", "32B", "30B-A3B"])
def test_published_models_are_recovered(name):
    k2, k3, c, k1, k4 = {
        "7B": (0.0064, 1.231e-4, 0.0027, 3.35e-8, 0.0028),
        "14B": (0.012303, 2.441e-4, 0.0049, 1.165e-7, 0.00197),
        "32B": (0.0250194, 2.446e-4, 0.01838, 6.3e-8, 2e-10),
        "30B-A3B": (0.0115108, 1.249e-4, 0.00979, 7.28e-8, 0.00087),
    }[name]
    fit = fit_decode(timings(k1, k2, k3, c, k4))
    assert fit.k1 == pytest.approx(k1, rel=0.02)
    assert fit.k2 + fit.k4 == pytest.approx(k2 + k4, rel=0.02)
    assert fit.k3 == pytest.approx(k3, rel=0.02)
    assert fit.c + fit.k4 == pytest.approx(c + k4, rel=0.02)


def test_all_on_the_floor():
    found = timings(1e-7, 0.02, 1e-5, 1e-4, 0.0)
    fit = fit_decode(found)
    assert off(fit, found).worst < 1e-6
    assert fit.k2 == pytest.approx(0.02, rel=1e-3)
    assert fit.seconds(64, 0) == pytest.approx(0.02, rel=1e-3)


def test_all_on_the_slope():
    found = timings(1e-7, 0.0, 1e-4, 2e-3, 0.0)
    fit = fit_decode(found)
    assert off(fit, found).worst < 1e-6
    assert fit.k3 == pytest.approx(1e-4, rel=1e-3)
    assert fit.c == pytest.approx(2e-3, rel=1e-3)


@pytest.mark.parametrize("found", [[DecodeTiming(1, 10, 0.5)], [DecodeTiming(3, 0, 0.5)] * 4])
def test_one_point_is_met(found):
    assert fit_decode(found).seconds(found[0].n, found[0].kv_tokens) == pytest.approx(0.5)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            DecodeTiming,
            st.integers(1, 64),
            st.integers(0, 10_000),
            st.floats(1e-4, 1.0),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_no_coefficient_is_negative_whatever_is_measured(found):
    fit = fit_decode(found)
    assert isinstance(fit, DecodeFit)
    assert min(fit) >= 0
    assert off(fit, found).mean <= 1.0  # never worse than to say nothing takes time


@given(each=st.floats(1e-6, 1e-2), fixed=st.floats(0, 10))
def test_a_line_is_recovered(each, fixed):
    amounts = [100, 500, 2000, 9000]
    fit = fit_line(amounts, [each * a + fixed for a in amounts])
    assert fit.each == pytest.approx(each, rel=1e-3, abs=1e-6 * fixed)
    assert fit.fixed == pytest.approx(fixed, abs=1e-3 * each * 100 + 1e-6 * fixed)


def test_a_line_that_would_begin_below_nothing_begins_at_nothing():
    fit = fit_line([100, 200], [0.5, 2.0])
    assert fit.fixed == 0
    assert fit.each > 0


def test_nonnegative_agrees_with_a_search():
    """Against every point of a grid around it, for two columns."""
    rng = random.Random(3)
    for _ in range(20):
        columns = np.array([[rng.uniform(-1, 3), rng.uniform(0, 3)] for _ in range(5)])
        seconds = np.array([rng.uniform(0.5, 2) for _ in range(5)])
        found, loss = nonnegative(columns, seconds)
        assert min(found) >= 0
        for a in np.linspace(0, 3, 31):
            for b in np.linspace(0, 3, 31):
                other = float((((columns @ [a, b]) / seconds - 1) ** 2).mean())
                assert loss <= other + 1e-12


def test_errors_are_shares_of_what_was_measured():
    assert errors([1.0, 3.0], [2.0, 2.0]) == (0.5, 0.5)
    assert errors([2.0, 3.0], [2.0, 4.0]) == (0.125, 0.25)
