"""Exponentials of columns against numpy's, in float64."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from rhymeflow.cpu.column_exp import exponentials, slopes
from rhymeflow.cpu.tiles import LANES

STEP = 40
"""Elements from one score of a column to the next."""


@njit
def _exponentials(scores, at, count, largest, total, to):
    exponentials(scores, at, STEP, count, largest, total, to)


@njit
def _slopes(scores, slopes_, at, count, log_sums, inner, to):
    slopes(scores, slopes_, at, STEP, count, log_sums, inner, to)


def _columns(array: np.ndarray, at: int) -> np.ndarray:
    return array.reshape(-1, STEP)[:, at : at + LANES].astype(np.float64)


@pytest.mark.parametrize(("count", "at", "to"), [(1, 0, 0), (7, 24, 3), (300, 5, 16)])
def test_weights_their_largest_score_and_their_sum(count: int, at: int, to: int):
    scores = np.random.default_rng(count).uniform(-60, 30, count * STEP).astype(np.float32)
    given, (largest, total) = scores.copy(), np.full((2, 32), 9.0, np.float32)
    _exponentials(scores, at, count, largest, total, to)
    columns = given.reshape(-1, STEP)[:, at : at + LANES]
    most = columns.max(0)
    expected = np.exp((columns - most).astype(np.float64))
    expected[columns - most < -87] = 0
    np.testing.assert_array_equal(largest[to:][:LANES], most)
    np.testing.assert_allclose(_columns(scores, at), expected, rtol=2.4e-7)
    np.testing.assert_allclose(total[to:][:LANES], expected.sum(0), rtol=1e-6)
    outside = np.ones(STEP, bool)
    outside[at : at + LANES] = False
    assert np.array_equal(scores.reshape(-1, STEP)[:, outside], given.reshape(-1, STEP)[:, outside])
    assert (np.delete(largest, range(to, to + LANES)) == 9.0).all()


def test_what_is_hidden_weighs_nothing_and_what_is_no_number_stays_none():
    scores = np.zeros((3, STEP), np.float32)
    scores[1, :LANES] = -1e30
    scores[2, 5] = np.nan
    largest, total = np.zeros((2, LANES), np.float32)
    _exponentials(scores.reshape(-1), 0, 3, largest, total, 0)
    assert (scores[1, :LANES] == 0.0).all()
    assert np.isnan(total).nonzero()[0].tolist() == [5]
    assert (np.delete(total, 5) == 2.0).all()


def test_slopes_are_those_of_a_softmax():
    rng = np.random.default_rng(0)
    scores, given = rng.uniform(-9, 0, (2, 50 * STEP)).astype(np.float32)
    log_sums, inner = rng.standard_normal((2, 32)).astype(np.float32) + np.float32(3)
    before = _columns(scores, 8), _columns(given, 8)
    _slopes(scores, given, 8, 50, log_sums, inner, 16)
    weights = np.exp(before[0] - log_sums[16:])
    np.testing.assert_allclose(_columns(scores, 8), weights, rtol=1e-6)
    np.testing.assert_allclose(
        _columns(given, 8), weights * (before[1] - inner[16:]), rtol=1e-5, atol=1e-9
    )
