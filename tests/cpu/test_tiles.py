"""Products of small matrices against numpy's, in the parts of either kind of processor."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from rhymeflow.cpu import tiles
from rhymeflow.cpu.attention import exp_of_negative
from rhymeflow.cpu.tiles import BYTES, LANES, ROWS, transpose


def compiled(columns: int, adds: bool, wide: bool):
    tile = tiles._tile(columns, adds=adds, wide=wide)

    @njit
    def call(rows, out, o, out_row, left, a, left_row, left_step, right, b, right_step, depth):
        tile(out, o, out_row, left, a, left_row, left_step, right, b, right_step, depth)

    return call


def compiled_rows(columns: int, wide: bool):
    tile = tiles._row_tile(columns, wide=wide)

    @njit
    def call(rows, out, o, out_row, left, a, left_row, left_step, right, b, right_step, depth):
        tile(rows, out, o, out_row, left, a, left_row, left_step, right, b, right_step, depth)

    return call


WIDE = (False, True)
TILES = {
    (columns, adds, wide): compiled(columns, adds, wide)
    for columns in (16, 32)
    for adds in (False, True)
    for wide in WIDE
}
ROW_TILES = {
    (columns, False, wide): compiled_rows(columns, wide) for columns in (8, 16, 32) for wide in WIDE
}


def as_bfloat16(x):
    """The bits of numbers that bfloat16 has."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


layouts = st.tuples(
    st.integers(1, 40),  # depth
    st.integers(0, 5),  # elements between two rows
    st.tuples(*[st.integers(0, 7)] * 3),  # where the arrays' contents begin
    st.booleans(),  # whether the left one is transposed
)


def check_product(call, kind, layout, rows=ROWS, is_half=False):
    """Whole numbers: every sum is exact, in any order."""
    (columns, adds, _), (depth, gap, (o, a, b), is_transposed) = kind, layout
    rng, step = np.random.default_rng(depth), columns + gap
    left = rng.integers(-9, 9, a + (ROWS + gap) * (depth + gap)).astype(np.float32)
    right = rng.integers(-9, 9, b + depth * step).astype(np.float32)
    out = rng.integers(-9, 9, o + ROWS * step + 3).astype(np.float32)
    left_row, left_step = (1, ROWS + gap) if is_transposed else (depth + gap, 1)
    index = a + left_row * np.arange(rows)[:, None] + left_step * np.arange(depth)
    factor = right[b:].reshape(depth, step)[:, :columns]
    expected = out.copy()
    where = o + step * np.arange(ROWS)[:, None] + np.arange(columns)
    expected[where[:rows]] = left[index] @ factor + (out[where[:rows]] if adds else 0)
    given_right = as_bfloat16(right) if is_half else right
    call(rows, out, o, step, left, a, left_row, left_step, given_right, b, step, depth)
    computed = next(count for count in tiles.ROW_COUNTS if count >= rows)
    expected[where[rows:computed]] = out[where[rows:computed]]
    np.testing.assert_array_equal(out, expected)  # and nothing beside it was written


@pytest.mark.parametrize("kind", TILES)
@given(layout=layouts)
@settings(max_examples=15, deadline=None)
def test_equals_numpy(kind, layout):
    check_product(TILES[kind], kind, layout)


@pytest.mark.parametrize("kind", ROW_TILES)
@pytest.mark.parametrize("rows", range(1, ROWS + 1))
@given(layout=layouts, is_half=st.booleans())
@settings(max_examples=10, deadline=None)
def test_any_number_of_rows(kind, rows, layout, is_half):
    check_product(ROW_TILES[kind], kind, layout, rows, is_half)


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
