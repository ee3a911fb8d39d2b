"""Products of small matrices against numpy's, in the parts of either kind of processor."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from rhymeflow.cpu import tiles
from rhymeflow.cpu.attention import exp_of_negative
from rhymeflow.cpu.tiles import LANES, ROWS
from rhymeflow.cpu.transpose import BYTES, transpose


def compiled(columns: int, adds: bool, wide: bool):
    tile = tiles._tile(columns, adds=adds, wide=wide)

    @njit
    def call(out, o, out_row, left, a, left_row, left_step, right, b, right_step, depth):
        tile(out, o, out_row, left, a, left_row, left_step, right, b, right_step, depth)

    return call


TILES = {
    (columns, adds, wide): compiled(columns, adds, wide)
    for columns in (16, 32)
    for adds in (False, True)
    for wide in (False, True)
}


@pytest.mark.parametrize("kind", TILES)
@given(
    depth=st.integers(1, 40),
    gap=st.integers(0, 5),
    places=st.tuples(*[st.integers(0, 7)] * 3),
    is_transposed=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_equals_numpy(kind, depth, gap, places, is_transposed):
    columns, adds, _ = kind
    rng = np.random.default_rng(depth)
    o, a, b = places
    # Whole numbers: every sum is exact, in any order.
    left = rng.integers(-9, 9, a + (ROWS + gap) * (depth + gap)).astype(np.float32)
    right = rng.integers(-9, 9, b + depth * (columns + gap)).astype(np.float32)
    out = rng.integers(-9, 9, o + ROWS * (columns + gap) + 3).astype(np.float32)
    left_row, left_step = (1, ROWS + gap) if is_transposed else (depth + gap, 1)
    index = a + left_row * np.arange(ROWS)[:, None] + left_step * np.arange(depth)
    factor = right[b:].reshape(depth, columns + gap)[:, :columns]
    expected = out.copy()
    where = o + (columns + gap) * np.arange(ROWS)[:, None] + np.arange(columns)
    expected[where] = left[index] @ factor + (out[where] if adds else 0)
    TILES[kind](out, o, columns + gap, left, a, left_row, left_step, right, b, columns + gap, depth)
    np.testing.assert_array_equal(out, expected)  # and nothing beside it was written


def compiled_rows(columns: int, wide: bool):
    tile = tiles._row_tile(columns, wide=wide)

    @njit
    def call(rows, out, o, out_row, left, left_row, left_step, right, b, right_step, depth):
        tile(rows, out, o, out_row, left, 0, left_row, left_step, right, b, right_step, depth)

    return call


ROW_TILES = {
    (columns, wide): compiled_rows(columns, wide)
    for columns in (8, 16, 32)
    for wide in (False, True)
}


def as_bfloat16(x):
    """The bits of numbers that bfloat16 has."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("kind", ROW_TILES)
@pytest.mark.parametrize("rows", range(1, ROWS + 1))
@given(
    depth=st.integers(1, 40),
    gap=st.integers(0, 5),
    is_half=st.booleans(),
    is_transposed=st.booleans(),
)
@settings(max_examples=10, deadline=None)
def test_any_number_of_rows(kind, rows, depth, gap, is_half, is_transposed):
    columns, _ = kind
    rng = np.random.default_rng(depth)
    left = rng.integers(-9, 9, (ROWS + gap) * (depth + gap)).astype(np.float32)
    right = rng.integers(-9, 9, (depth + 1) * (columns + gap)).astype(np.float32)
    out = rng.integers(-9, 9, 3 + ROWS * (columns + gap)).astype(np.float32)
    left_row, left_step = (1, ROWS + gap) if is_transposed else (depth + gap, 1)
    index = left_row * np.arange(rows)[:, None] + left_step * np.arange(depth)
    factor = right[gap:][: depth * (columns + gap)].reshape(depth, columns + gap)[:, :columns]
    expected = out.copy()
    where = 3 + (columns + gap) * np.arange(ROWS)[:, None] + np.arange(columns)
    expected[where[:rows]] = left[index] @ factor
    given_right = as_bfloat16(right) if is_half else right
    step = columns + gap
    ROW_TILES[kind](rows, out, 3, step, left, left_row, left_step, given_right, gap, step, depth)
    computed = next(count for count in tiles.ROW_COUNTS if count >= rows)
    expected[where[rows:computed]] = out[where[rows:computed]]
    np.testing.assert_array_equal(out, expected)


@njit
def transposed(out, o, out_row, held, a, held_row):
    transpose(out, o, out_row, held, a, held_row)


@pytest.mark.parametrize("is_half", [False, True])
@given(gaps=st.tuples(*[st.integers(0, 9)] * 4))
@settings(max_examples=20, deadline=None)
def test_rows_become_columns(is_half, gaps):
    o, a, out_gap, held_gap = gaps
    width = BYTES // (2 if is_half else 4)
    held = np.random.default_rng(o).integers(-255, 255, a + LANES * (width + held_gap) + 8)
    held = held.astype(np.float32)
    out = np.full(o + width * (LANES + out_gap) + 8, 7, np.float32)
    expected = out.copy()
    rows = held[a:][: LANES * (width + held_gap)].reshape(LANES, -1)[:, :width]
    expected[o:][: width * (LANES + out_gap)].reshape(width, -1)[:, :LANES] = rows.T
    transposed(out, o, LANES + out_gap, as_bfloat16(held) if is_half else held, a, width + held_gap)
    np.testing.assert_array_equal(out, expected)


def test_exponential_to_two_units_in_the_last_place():
    @njit
    def each(x):
        return np.array([exp_of_negative(v) for v in x])

    x = -np.concatenate([np.linspace(0, 86.9, 40_001), np.geomspace(1e-30, 1, 1000)])
    x = x.astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(each(x) - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()
    assert (each(np.array([-88.0, -1e30, -np.inf], np.float32)) == 0.0).all()
