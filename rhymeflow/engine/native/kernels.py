"""Attention through the cache, compiled for CPUs: every span of one size class in one call.

For a span and a key-value head, the rows of all its tokens and of the query heads that share the
head are the columns of a small matrix; scores are keys times it, and the output is values times
the weights, columns again. Rows are taken in blocks of 32 or 16, so a prompt's thousand tokens and
a single one go the same way, and nothing is padded but the last block.

Holds true: a row's output is summed in an order that depends on its own sequence alone, so it is
the same to the last bit whatever else runs beside it, drafted or not. What lies in the cache beyond
a span's end is not read into any sum. Sums and the softmax are in float32 whatever the cache holds.
Knows nothing of requests or torch.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import overload

from rhymeflow.utils.fast_exp import exp_of_negative
from rhymeflow.utils.gemm import LANES, ROWS, tile_16, tile_32
from rhymeflow.utils.prefetch import prefetch

BLOCK = 2 * LANES
"""Most rows at a time."""
_LINE = 64
"""Bytes of a cache line."""
_UNSEEN = np.float32(-1e30)
_MATH = {"contract", "nsz", "arcp"}
"""What the compiler may do to floats; not to change the order of sums."""


def scratch(longest: int, head_dim: int) -> tuple[np.ndarray, ...]:
    """Working memory for sequences of up to `longest` tokens: what `attend` takes as `room`."""
    longest = -(-longest // ROWS) * ROWS
    sizes = (longest * head_dim, longest * head_dim, head_dim * BLOCK, longest * BLOCK)
    return (*(np.zeros(size, np.float32) for size in sizes), np.zeros(BLOCK, np.float32))


@njit(cache=True, nogil=True, fastmath=_MATH)
def attend(q, new_k, new_v, keys, values, out, scale, capacity, sizes, spans, parents, room):
    """Write new keys and values into the cache, attend, and fill `out`, for every span.

    `q`, `out` [T * H * D] and `new_k`, `new_v` [T * G * D] are the packed row; `keys`, `values`
    [slots * G * capacity * D] a layer of the size class. All are float32, or keys and values, new
    and old, are the bits of bfloat16 as uint16. `sizes`: (H, G, D), D a multiple of `ROWS`. `spans`
    int64 [n, 5]: first row, slot, cached, new tokens, and where in `parents` its tree begins, -1
    for none; there stand the number of the tree's nodes and the parent of each. `room`: `scratch`.
    """
    heads, kv_heads, dim = sizes
    keys_f, values_f, columns, scores, total = room
    for i in range(len(spans)):
        start, slot, cached, new, tree = spans[i]
        for head in range(kv_heads):
            base = (slot * kv_heads + head) * capacity * dim
            _write(keys, new_k, base + cached * dim, start, new, head, kv_heads, dim)
            _write(values, new_v, base + cached * dim, start, new, head, kv_heads, dim)
            length = cached + new
            k, k_base = _floats(keys, base, length * dim, keys_f)
            v, v_base = _floats(values, base, length * dim, values_f)
            group = heads // kv_heads
            after, ahead = _next(spans, i, head, kv_heads)
            soon = (after[1] * kv_heads + ahead) * capacity * dim
            for first in range(0, new * group, BLOCK):
                rows = min(BLOCK, new * group - first)
                lanes = LANES if rows <= LANES else BLOCK
                seen = cached + (first + rows - 1) // group + 1
                _gather(q, columns, start, first, rows, lanes, head, heads, group, dim, scale)
                for row in range(0, seen, ROWS):
                    if first == 0 and row < after[2]:
                        _ask(keys, values, soon + row * dim, ROWS * dim)
                    at = k_base + row * dim
                    _multiply(scores, row * lanes, k, at, dim, 1, columns, lanes, dim)
                _mask(scores, first, rows, lanes, cached, seen, group, new, tree, parents)
                _softmax(scores, total, seen, lanes)
                for d in range(0, dim, ROWS):
                    _multiply(columns, d * lanes, v, v_base + d, 1, dim, scores, lanes, seen)
                _scatter(out, columns, total, start, first, rows, lanes, head, heads, group, dim)


@njit(cache=True)
def _next(spans, i, head, kv_heads):
    """The span and head after this one, to have its keys and values on their way."""
    if head + 1 < kv_heads:
        return spans[i], head + 1
    return spans[min(i + 1, len(spans) - 1)], 0


@njit(inline="always")
def _ask(keys, values, start, count):
    """Have so many elements of both on their way."""
    for place in range(start, start + count, _LINE // keys.itemsize):
        prefetch(keys, place)
        prefetch(values, place)


@njit(inline="always")
def _multiply(out, o, left, a, left_row, left_step, right, lanes, depth):
    """`tile_16` or `tile_32`, for a right side and an output of so many columns."""
    if lanes == LANES:
        tile_16(out, o, lanes, left, a, left_row, left_step, right, 0, lanes, depth)
    else:
        tile_32(out, o, lanes, left, a, left_row, left_step, right, 0, lanes, depth)


@njit(cache=True)
def _write(cache, new, at, start, count, head, kv_heads, dim):
    """Enter the head's part of `count` new rows into the cache."""
    for i in range(count):
        source = new[((start + i) * kv_heads + head) * dim :][:dim]
        cache[at + i * dim :][:dim] = source


def _floats(held, base, count, space):
    """`count` elements from `base` as float32: an array, and where in it they begin."""


@overload(_floats)
def _floats_of(held, base, count, space):
    if isinstance(held.dtype, types.Float):
        return lambda held, base, count, space: (held, base)

    def from_bfloat16(held, base, count, space):
        bits = space.view(np.uint32)[:count]
        source = held[base:][:count]
        for i in range(count):
            bits[i] = np.uint32(source[i]) << np.uint32(16)
        return space, 0

    return from_bfloat16


@njit(cache=True)
def _gather(q, columns, start, first, rows, lanes, head, heads, group, dim, scale):
    """The block's queries as columns: row r is query head r % group of token r // group."""
    columns[: dim * lanes] = np.float32(0)
    for r in range(rows):
        token, of_group = divmod(first + r, group)
        row = q[((start + token) * heads + head * group + of_group) * dim :][:dim]
        for d in range(dim):
            columns[d * lanes + r] = row[d] * scale


@njit(cache=True)
def _scatter(out, columns, total, start, first, rows, lanes, head, heads, group, dim):
    """The columns back to rows, divided by the sum of their weights."""
    for r in range(rows):
        token, of_group = divmod(first + r, group)
        row = out[((start + token) * heads + head * group + of_group) * dim :][:dim]
        share = np.float32(1) / total[r]
        for d in range(dim):
            row[d] = columns[d * lanes + r] * share


@njit(cache=True)
def _mask(scores, first, rows, lanes, cached, seen, group, new, tree, parents):
    """Hide what comes after a token, and in a tree what is not its ancestor."""
    nodes = parents[tree] if tree >= 0 else 0
    root = cached + new - nodes
    for r in range(rows):
        own = cached + (first + r) // group
        for place in range(own + 1, seen):
            scores[place * lanes + r] = _UNSEEN
        if own < root:
            continue
        ancestor = own - root
        for node in range(own - root, -1, -1):
            if node == ancestor:
                ancestor = parents[tree + 1 + node]
            else:
                scores[(root + node) * lanes + r] = _UNSEEN


@njit(cache=True, fastmath=_MATH)
def _softmax(scores, total, seen, lanes):
    """Scores [seen, lanes] to weights exp(score - greatest of its column), and their sums."""
    for first in range(0, lanes, LANES):
        greatest = np.full(LANES, _UNSEEN, np.float32)
        sums = total[first:][:LANES]
        sums[:] = np.float32(0)
        for place in range(seen):
            row = scores[place * lanes + first :][:LANES]
            for r in range(LANES):
                greatest[r] = greatest[r] if greatest[r] > row[r] else row[r]
        for place in range(seen):
            row = scores[place * lanes + first :][:LANES]
            for r in range(LANES):
                weight = exp_of_negative(row[r] - greatest[r])
                row[r] = weight
                sums[r] += weight


__all__ = ["BLOCK", "attend", "scratch"]
