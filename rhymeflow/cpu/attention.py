"""Attention through the cache, compiled for CPUs: all spans of one size class in one call.

For a span and a key-value head, the queries of the new tokens, in all query heads that share that
head, are the rows of small matrices, at most 8 rows each. Scores are their products with the keys,
which are transposed once. Sums are float32, in an order that depends on a row's own sequence alone:
its result is the same to the last bit whatever runs with it, drafted or not, in a line or a tree.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from rhymeflow.cpu.tiles import (
    BYTES,
    LANES,
    ROWS,
    prefetch,
    row_tile_8,
    row_tile_16,
    row_tile_32,
    transpose,
)

PANEL = 2 * LANES
"""Cached tokens whose keys are transposed together, to [D, PANEL]. It divides every size class's
capacity, so keys beyond a span's end may be read."""
_LINE = 64
"""Bytes of a cache line."""
_UNSEEN = np.float32(-1e30)
_LEAST = np.float32(-87.0)
"""The exponential of what is less than this counts as 0."""
_ROUNDING = np.float32(1.5 * 2**23)
"""Adding it to a small number leaves the nearest integer in the last bits."""
_MATH = {"contract", "nsz", "arcp"}
"""Allowed float optimisations, which exclude reordering sums."""


def scratch(longest: int, head_dim: int) -> tuple[np.ndarray, ...]:
    """Return working memory for sequences of up to `longest` tokens, `attend`'s `room`."""
    longest = -(-longest // PANEL) * PANEL
    sizes = (longest * head_dim, ROWS * head_dim, ROWS * longest, ROWS)
    return tuple(_aligned(size) for size in sizes)


def _aligned(size: int) -> np.ndarray:
    space = np.zeros(size + LANES, np.float32)
    return space[-space.ctypes.data % _LINE // space.itemsize :][:size]


@njit(cache=True, nogil=True, fastmath=_MATH, error_model="numpy")
def attend(q, new_k, new_v, kv, out, scale, layer, capacity, sizes, spans, parents, room):
    """Write new keys and values into the cache, attend, and fill `out`, for every span.

    `q`, `out` [T * H * D] and `new_k`, `new_v` [T * G * D] are the packed row; `kv` is the size
    class, in which a layer's keys and values, [slots * G * capacity * D] each, begin at the two
    indices `layer`. All are float32, or keys and values, new and old, are the bits of bfloat16 as
    uint16. `capacity` is a multiple of `PANEL`. `sizes` is (H, G, D), D a multiple of `ROWS`.
    `spans`, int64 [n, 5]: first row, slot, cached tokens, new tokens, and the index in `parents` of
    its tree (the number of its nodes, then the parent of each), or -1. `room` is from `scratch`.
    """
    heads, kv_heads, dim = sizes
    transposed, block, scores, total = room
    group = heads // kv_heads
    columns = PANEL if dim >= PANEL else LANES if dim >= LANES else ROWS
    keys, values = kv[layer[0] :], kv[layer[1] :]
    for i in range(len(spans)):
        start, slot, cached, new, tree = spans[i]
        for head in range(kv_heads):
            base = (slot * kv_heads + head) * capacity * dim
            _write(keys, new_k, base + cached * dim, start, new, head, kv_heads, dim)
            _write(values, new_v, base + cached * dim, start, new, head, kv_heads, dim)
            next_span, next_head = _next(spans, i, head, kv_heads)
            next_base = (next_span[1] * kv_heads + next_head) * capacity * dim
            length = cached + new
            for place in range(0, length, PANEL):
                if place < next_span[2]:
                    _prefetch(keys, values, next_base + place * dim, PANEL * dim)
                _transpose(keys, base + place * dim, dim, transposed, place * dim)
            for first in range(0, new * group, ROWS):
                rows = min(ROWS, new * group - first)
                seen = cached + (first + rows - 1) // group + 1
                wide = -(-seen // PANEL) * PANEL
                _gather(q, block, start, first, rows, head, heads, group, dim, scale)
                for place in range(0, wide, PANEL):
                    at = place * dim
                    _multiply(
                        rows, PANEL, scores, place, wide, block, dim, transposed, at, PANEL, dim
                    )
                _mask(scores, first, rows, wide, cached, group, new, tree, parents)
                _softmax(scores, total, rows, wide)
                if tree >= 0:
                    _sum_by_paths(
                        scores, total, first, rows, wide, cached, group, new, tree, parents
                    )
                for d in range(0, dim, columns):
                    d = min(d, dim - columns)  # the last columns may be computed twice
                    _multiply(
                        rows, columns, block, d, dim, scores, wide, values, base + d, dim, seen
                    )
                _scatter(out, block, total, start, first, rows, head, heads, group, dim)


@njit(cache=True, error_model="numpy")
def _next(spans, i, head, kv_heads):
    """Return the span and head after this one, whose keys and values are to be prefetched."""
    if head + 1 < kv_heads:
        return spans[i], head + 1
    return spans[min(i + 1, len(spans) - 1)], 0


@njit(inline="always")
def _prefetch(keys, values, start, count):
    for place in range(start, start + count, _LINE // keys.itemsize):
        prefetch(keys, place)
        prefetch(values, place)


@njit(inline="always")
def _multiply(rows, columns, out, o, out_row, left, left_row, right, b, right_step, depth):
    """Set `rows` by `columns` of `out` to the product of `left`'s rows and `right`."""
    if columns == PANEL:
        row_tile_32(rows, out, o, out_row, left, 0, left_row, 1, right, b, right_step, depth)
    elif columns == LANES:
        row_tile_16(rows, out, o, out_row, left, 0, left_row, 1, right, b, right_step, depth)
    else:
        row_tile_8(rows, out, o, out_row, left, 0, left_row, 1, right, b, right_step, depth)


@njit(inline="always")
def _transpose(keys, at, dim, transposed, o):
    width = BYTES // keys.itemsize
    for row in range(0, PANEL, LANES):
        for d in range(0, dim, width):
            transpose(transposed, o + d * PANEL + row, PANEL, keys, at + row * dim + d, dim)


@njit(cache=True, error_model="numpy")
def _write(cache, new, at, start, count, head, kv_heads, dim):
    for i in range(count):
        source = new[((start + i) * kv_heads + head) * dim :][:dim]
        cache[at + i * dim :][:dim] = source


@njit(cache=True, error_model="numpy")
def _gather(q, block, start, first, rows, head, heads, group, dim, scale):
    """Copy a block's queries: row r is query head r % group of token r // group."""
    for r in range(rows):
        token, of_group = divmod(first + r, group)
        row = q[((start + token) * heads + head * group + of_group) * dim :][:dim]
        for d in range(dim):
            block[r * dim + d] = row[d] * scale


@njit(cache=True, error_model="numpy")
def _scatter(out, block, total, start, first, rows, head, heads, group, dim):
    """Copy a block's rows to `out`, each divided by the sum of its weights."""
    for r in range(rows):
        token, of_group = divmod(first + r, group)
        row = out[((start + token) * heads + head * group + of_group) * dim :][:dim]
        share = np.float32(1) / total[r]
        for d in range(dim):
            row[d] = block[r * dim + d] * share


@njit(cache=True, error_model="numpy")
def _mask(scores, first, rows, wide, cached, group, new, tree, parents):
    """Hide later tokens and, in a tree, those that are no ancestors."""
    nodes = parents[tree] if tree >= 0 else 0
    root = cached + new - nodes
    for r in range(rows):
        position = cached + (first + r) // group
        row = scores[r * wide :][:wide]
        row[position + 1 :] = _UNSEEN
        if position < root:
            continue
        ancestor = position - root
        for node in range(position - root, -1, -1):
            if node == ancestor:
                ancestor = parents[tree + 1 + node]
            else:
                row[root + node] = _UNSEEN


@njit(cache=True, fastmath=_MATH, error_model="numpy")
def _softmax(scores, total, rows, wide):
    """Turn scores [rows, wide] into weights exp(score - greatest of its row), and sum them."""
    greatest, sums = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    for r in range(rows):
        greatest[:] = _UNSEEN
        sums[:] = np.float32(0)
        for place in range(r * wide, (r + 1) * wide, LANES):
            part = scores[place:][:LANES]
            for j in range(LANES):
                greatest[j] = greatest[j] if greatest[j] > part[j] else part[j]
        most = greatest.max()
        for place in range(r * wide, (r + 1) * wide, LANES):
            part = scores[place:][:LANES]
            for j in range(LANES):
                weight = exp_of_negative(part[j] - most)
                part[j] = weight
                sums[j] += weight
        total[r] = sums.sum()


@njit(inline="always")
def exp_of_negative(x):
    """Return exp(x) of x <= 0 to 2 ulp, as 2^n times a polynomial of the rest; vectorisable.

    The polynomial is Taylor's up to x^7: |x - n log 2| <= log(2) / 2 leaves an error of less than
    1e-8. log 2 is subtracted in two parts, since n times the first is exact. NaN stays NaN. The
    caller's `fastmath` must not reorder sums.
    """
    clipped = _LEAST if x < _LEAST else x
    rounded = clipped * np.float32(1.4426950408889634) + _ROUNDING
    n = rounded - _ROUNDING
    rest = n * np.float32(2.12194440e-4) + (n * np.float32(-0.693359375) + clipped)
    y = np.float32(1 / 5040)
    y = y * rest + np.float32(1 / 720)
    y = y * rest + np.float32(1 / 120)
    y = y * rest + np.float32(1 / 24)
    y = y * rest + np.float32(1 / 6)
    y = y * rest + np.float32(1 / 2)
    y = y * rest + np.float32(1)
    y = y * rest + np.float32(1)
    bits = (np.float32(rounded).view(np.int32) << np.int32(23)) + np.int32(127 << 23)
    return np.float32(0) if x < _LEAST else y * np.int32(bits).view(np.float32)


@njit(cache=True, fastmath=_MATH, error_model="numpy")
def _sum_by_paths(scores, total, first, rows, wide, cached, group, new, tree, parents):
    """Sum the weights in rows of a tree's nodes again, as `_softmax` would if the ancestors of each
    were consecutive."""
    nodes = parents[tree]
    root = cached + new - nodes
    sums, path = np.empty(LANES, np.float32), np.empty(nodes, np.int64)
    for r in range(rows):
        node = cached + (first + r) // group - root
        if node < 0:
            continue
        row = scores[r * wide :][:wide]
        sums[:] = np.float32(0)
        for place in range(0, root - LANES + 1, LANES):
            for j in range(LANES):
                sums[j] += row[place + j]
        for place in range(root - root % LANES, root):
            sums[place % LANES] += row[place]
        depth = 0
        while node >= 0:
            path[depth] = node
            node = parents[tree + 1 + node]
            depth += 1
        for k in range(depth):
            sums[(root + k) % LANES] += row[root + path[depth - 1 - k]]
        total[r] = sums.sum()
