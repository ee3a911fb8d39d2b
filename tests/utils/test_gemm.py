"""Products of small matrices against numpy's, in the parts of either kind of processor."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from rhymeflow.utils import gemm
from rhymeflow.utils.fast_exp import exp_of_negative
from rhymeflow.utils.gemm import LANES, ROWS


def compiled(vectors: int, adds: bool, wide: bool):
    tile = gemm._tile(vectors, adds=adds, wide=wide)

    @njit
    def call(out, o, out_row, left, a, left_row, left_step, right, b, right_step, depth):
        tile(out, o, out_row, left, a, left_row, left_step, right, b, right_step, depth)

    return call


TILES = {
    (vectors, adds, wide): compiled(vectors, adds, wide)
    for vectors in (1, 2)
    for adds in (False, True)
    for wide in (False, True)
}


@pytest.mark.parametrize("kind", TILES)
@given(
    depth=st.integers(1, 40),
    gap=st.integers(0, 5),
    places=st.tuples(*[st.integers(0, 7)] * 3),
    is_turned=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_equals_numpy(kind, depth, gap, places, is_turned):
    vectors, adds, _ = kind
    columns, rng = vectors * LANES, np.random.default_rng(depth)
    o, a, b = places
    # Whole numbers: every sum is exact, in any order.
    left = rng.integers(-9, 9, a + (ROWS + gap) * (depth + gap)).astype(np.float32)
    right = rng.integers(-9, 9, b + depth * (columns + gap)).astype(np.float32)
    out = rng.integers(-9, 9, o + ROWS * (columns + gap) + 3).astype(np.float32)
    left_row, left_step = (1, ROWS + gap) if is_turned else (depth + gap, 1)
    index = a + left_row * np.arange(ROWS)[:, None] + left_step * np.arange(depth)
    factor = right[b:].reshape(depth, columns + gap)[:, :columns]
    expected = out.copy()
    where = o + (columns + gap) * np.arange(ROWS)[:, None] + np.arange(columns)
    expected[where] = left[index] @ factor + (out[where] if adds else 0)
    TILES[kind](out, o, columns + gap, left, a, left_row, left_step, right, b, columns + gap, depth)
    np.testing.assert_array_equal(out, expected)  # and nothing beside it was written


def test_exponential_to_two_units_in_the_last_place():
    @njit
    def each(x):
        return np.array([exp_of_negative(v) for v in x])

    x = -np.concatenate([np.linspace(0, 86.9, 40_001), np.geomspace(1e-30, 1, 1000)])
    x = x.astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(each(x) - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()
    assert (each(np.array([-88.0, -1e30, -np.inf], np.float32)) == 0.0).all()
