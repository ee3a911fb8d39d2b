"""Attention through the cache, compiled for CPUs: every span of one size class in one call.

For a span and a key-value head, the vectors of its new tokens in the query heads that share the
head are the rows of a small matrix, at most 8 at a time. Scores are its product with the keys,
turned into columns once. A row is summed in float32, in an order that depends on its own sequence
alone: it is the same to the last bit whatever runs beside it, drafted or not, in a line or a tree.
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
"""Cached tokens whose keys are transposed into columns together: [D, PANEL]. It divides every size
class's capacity, so that keys beyond a span's end may be read."""
_LINE = 64
"""Bytes of a cache line."""
_UNSEEN = np.float32(-1e30)
_LEAST = np.float32(-87.0)
"""Less has an exponential of 0."""
_ROUNDING = np.float32(1.5 * 2**23)
"""Added to a small number it leaves the nearest whole number in the last bits."""
_MATH = {"contract", "nsz", "arcp"}
"""What the compiler may do to floats; not to change the order of sums."""


def scratch(longest: int, head_dim: int) -> tuple[np.ndarray, ...]:
    """Working memory for sequences of up to `longest` tokens: what `attend` takes as `room`."""
    longest = -(-longest // PANEL) * PANEL
    sizes = (longest * head_dim, ROWS * head_dim, ROWS * longest, ROWS)
    return tuple(_aligned(size) for size in sizes)


def _aligned(size: int) -> np.ndarray:
    """Zeros from the beginning of a cache line, so that no vector lies in two."""
    space = np.zeros(size + LANES, np.float32)
    return space[-space.ctypes.data % _LINE // space.itemsize :][:size]


@njit(cache=True, nogil=True, fastmath=_MATH, error_model="numpy")
def attend(q, new_k, new_v, kv, out, scale, layer, capacity, sizes, spans, parents, room):
    """Write new keys and values into the cache, attend, and fill `out`, for every span.

    `q`, `out` [T * H * D] and `new_k`, `new_v` [T * G * D] are the packed row; `kv` is the size
    class, in which a layer's keys and its values, [slots * G * capacity * D], begin at the two
    places `layer`. All are float32, or keys and values, new and old, are the bits of bfloat16 as
    uint16. `capacity` is a multiple of `PANEL`. `sizes`: (H, G, D), D a multiple of `ROWS`. `spans`
    int64 [n, 5]: first row, slot, cached, new tokens, and where in `parents` its tree begins, -1
    for none; there stand the number of the tree's nodes and the parent of each. `room`: `scratch`.
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
            after, ahead = _next(spans, i, head, kv_heads)
            soon = (after[1] * kv_heads + ahead) * capacity * dim
            length = cached + new
            for place in range(0, length, PANEL):
                if place < after[2]:
                    _ask(keys, values, soon + place * dim, PANEL * dim)
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
    """Keys of a panel's tokens as columns."""
    width = BYTES // keys.itemsize
    for row in range(0, PANEL, LANES):
        for d in range(0, dim, width):
            transpose(transposed, o + d * PANEL + row, PANEL, keys, at + row * dim + d, dim)


@njit(cache=True, error_model="numpy")
def _write(cache, new, at, start, count, head, kv_heads, dim):
    """Enter the head's part of `count` new rows into the cache."""
    for i in range(count):
        source = new[((start + i) * kv_heads + head) * dim :][:dim]
        cache[at + i * dim :][:dim] = source


@njit(cache=True, error_model="numpy")
def _gather(q, block, start, first, rows, head, heads, group, dim, scale):
    """The block's queries: row r is query head r % group of token r // group."""
    for r in range(rows):
        token, of_group = divmod(first + r, group)
        row = q[((start + token) * heads + head * group + of_group) * dim :][:dim]
        for d in range(dim):
            block[r * dim + d] = row[d] * scale


@njit(cache=True, error_model="numpy")
def _scatter(out, block, total, start, first, rows, head, heads, group, dim):
    """The block's rows to their places, divided by the sum of their weights."""
    for r in range(rows):
        token, of_group = divmod(first + r, group)
        row = out[((start + token) * heads + head * group + of_group) * dim :][:dim]
        share = np.float32(1) / total[r]
        for d in range(dim):
            row[d] = block[r * dim + d] * share


@njit(cache=True, error_model="numpy")
def _mask(scores, first, rows, wide, cached, group, new, tree, parents):
    """Hide what comes after a token, and in a tree what is not its ancestor."""
    nodes = parents[tree] if tree >= 0 else 0
    root = cached + new - nodes
    for r in range(rows):
        own = cached + (first + r) // group
        row = scores[r * wide :][:wide]
        row[own + 1 :] = _UNSEEN
        if own < root:
            continue
        ancestor = own - root
        for node in range(own - root, -1, -1):
            if node == ancestor:
                ancestor = parents[tree + 1 + node]
            else:
                row[root + node] = _UNSEEN


@njit(cache=True, fastmath=_MATH, error_model="numpy")
def _softmax(scores, total, rows, wide):
    """Scores [rows, wide] to weights exp(score - greatest of its row), and their sums."""
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
    """exp of x <= 0 to 2 ulp: 2^n times a polynomial of what is left, so that it can be vectors.

    The coefficients are those of 1/k! up to x^7: |x - n log 2| <= log(2) / 2 leaves an error of
    less than 1e-8. What is no number stays none. The caller's `fastmath` must not reorder sums.
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
    """Sums of the rows of a tree's nodes, in the order that they have where a node's ancestors lie
    one after another: `_softmax` takes tokens by their places, lane by lane."""
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
