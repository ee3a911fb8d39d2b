"""Products of small matrices against numpy's, in the parts of either kind of processor."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from rhymeflow.cpu.attention import exp_of_negative
from rhymeflow.cpu.tiles import BYTES, LANES, ROW_COUNTS, ROWS, _tile, transpose


def compiled(tile):
    @njit
    def call(rows, out, o, out_row, left, a, left_row, left_step, right, b, right_step, depth):
        tile(rows, out, o, out_row, left, a, left_row, left_step, right, b, right_step, depth)

    return call


KINDS = [
    *((columns, adds, wide, (ROWS,)) for columns in (16, 32) for adds in (0, 1) for wide in (0, 1)),
    *((columns, 0, wide, ROW_COUNTS) for columns in (8, 16, 32) for wide in (0, 1)),
]
"""Columns, whether it adds, whether at once, and numbers of rows."""


def as_bfloat16(x):
    """The bits of numbers that bfloat16 has."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


layouts = st.tuples(
    st.integers(1, 40),  # depth
    st.integers(0, 5),  # elements between two rows
    st.tuples(*[st.integers(0, 7)] * 3),  # where the arrays' contents begin
    st.booleans(),  # whether the left one is transposed
)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_equals_numpy(kind):
    columns, adds, wide, counts = kind
    call = compiled(_tile(columns, counts=counts, adds=bool(adds), wide=bool(wide)))

    @given(layout=layouts, rows=st.integers(1, ROWS), is_half=st.booleans())
    @settings(max_examples=60, deadline=None)
    def check(layout, rows, is_half):
        """Whole numbers: every sum is exact, in any order."""
        depth, gap, (o, a, b), is_transposed = layout
        if counts == (ROWS,):
            rows, is_half = ROWS, False
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
        computed = next(count for count in ROW_COUNTS if count >= rows)
        expected[where[rows:computed]] = out[where[rows:computed]]
        np.testing.assert_array_equal(out, expected)  # and nothing beside it was written

    check()


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
    assert np.isnan(each(np.array([np.nan], np.float32)))
