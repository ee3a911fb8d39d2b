"""Attention through the cache, compiled for CPUs: all spans of one size class in one call.

For a span and a key-value head, the queries of the new tokens, in all query heads that share that
head, are the rows of small matrices, at most 8 rows each. Scores are their products with the keys,
which are transposed once. Sums are float32, in an order that depends on a row's own sequence alone:
its result is the same to the last bit whatever runs with it, drafted or not, in a line or a tree.
Keys before those that a block of rows sees are not read; what is hidden adds exact zeros."""

from __future__ import annotations

from functools import cache

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
_LINE = 64  # bytes of a cache line
UNSEEN = np.float32(-1e30)  # a score whose weight is 0
UNLIMITED = 1 << 40  # a window or chunk longer than any sequence
_LEAST = np.float32(-87.0)  # the exponential of what is less than this counts as 0
_ROUNDING = np.float32(1.5 * 2**23)
"""Adding it to a small number leaves the nearest integer in the last bits."""
_MATH = {"contract", "nsz", "arcp"}  # allowed float optimisations, which exclude reordering sums


def scratch(longest: int, head_dim: int) -> tuple[np.ndarray, ...]:
    """Return working memory for sequences of up to `longest` tokens, `attend`'s `room`."""
    longest = -(-longest // PANEL) * PANEL
    sizes = (longest * head_dim, ROWS * head_dim, ROWS * longest, ROWS, ROWS)
    return tuple(_aligned(size) for size in sizes)


def limits(
    window: int | None, chunk: int | None, cap: float | None, sink_H: np.ndarray | None, heads: int
) -> tuple[tuple[int, int], np.float32, np.ndarray]:
    """Return what both kernels take as `reach`, `cap` and `sinks`; None: there is no such thing. A
    token sees, of its sequence, the last `window` up to itself, and none before the last multiple
    of `chunk`. Scores are capped by `cap`. A sink is the score of one more token, of value 0."""
    sinks = _no_sinks(heads) if sink_H is None else sink_H
    return (window or UNLIMITED, chunk or UNLIMITED), np.float32(cap or 0.0), sinks


@cache
def _no_sinks(heads: int) -> np.ndarray:
    return np.full(heads, UNSEEN)


def _aligned(size: int) -> np.ndarray:
    space = np.zeros(size + LANES, np.float32)
    return space[-space.ctypes.data % _LINE // space.itemsize :][:size]


@njit(cache=True, nogil=True, fastmath=_MATH, error_model="numpy")
def attend(
    q, new_k, new_v, kv, out, scale, reach, cap, sinks, layer, capacity, sizes, spans, parents, room
):
    """Write new keys and values into the cache, attend, and fill `out`, for every span.

    `q`, `out` [T * H * D] and `new_k`, `new_v` [T * G * D] are the packed row; `kv` is the size
    class, in which a layer's keys and values, [slots * G * capacity * D] each, begin at the two
    indices `layer`. All are float32, or keys and values, new and old, are the bits of bfloat16 as
    uint16. `reach`, `cap` and `sinks` are from `limits`. `capacity` is a multiple of `PANEL`.
    `sizes` is (H, G, D), D a multiple of `ROWS`. `spans`, int64 [n, 5]: first row, slot, cached
    tokens, new tokens, and the index in `parents` of its tree (the number of its nodes, then the
    parent of each), or -1. `room` is from `scratch`."""
    heads, kv_heads, dim = sizes
    transposed, block, scores, total, sunk = room
    group = heads // kv_heads
    columns = PANEL if dim >= PANEL else LANES if dim >= LANES else ROWS
    keys, values = kv[layer[0] :], kv[layer[1] :]
    for i in range(len(spans)):
        start, slot, cached, new, tree = spans[i]
        begun = _panel(cached, reach)
        for head in range(kv_heads):
            base = (slot * kv_heads + head) * capacity * dim
            _write(keys, new_k, base + cached * dim, start, new, head, kv_heads, dim)
            _write(values, new_v, base + cached * dim, start, new, head, kv_heads, dim)
            next_span, next_head = _next(spans, i, head, kv_heads)
            next_base = (next_span[1] * kv_heads + next_head) * capacity * dim
            ahead = _panel(next_span[2], reach) - begun
            length = cached + new
            for place in range(begun, length, PANEL):
                if place + ahead < next_span[2]:
                    _prefetch(keys, values, next_base + (place + ahead) * dim, PANEL * dim)
                _transpose(keys, base + place * dim, dim, transposed, place * dim)
            for first in range(0, new * group, ROWS):
                rows = min(ROWS, new * group - first)
                seen = cached + (first + rows - 1) // group + 1
                wide = -(-seen // PANEL) * PANEL
                # No token of the tree is at an earlier position than its first.
                nodes = parents[tree] if tree >= 0 else 0
                least = first_seen(min(cached + first // group, length - nodes), reach)
                begin = least // PANEL * PANEL
                _gather(q, block, start, first, rows, head, heads, group, dim, scale)
                for place in range(begin, wide, PANEL):
                    at = place * dim
                    _multiply(
                        rows, PANEL, scores, place, wide, block, 0, dim, transposed, at, PANEL, dim
                    )
                if cap > 0:
                    for r in range(rows):
                        capped(scores[r * wide + begin : (r + 1) * wide], cap)
                _mask(scores, first, rows, wide, begin, cached, group, new, tree, parents, reach)
                _softmax(
                    scores, total, sunk, rows, wide, begin, sinks[head * group :], first, group
                )
                if tree >= 0:
                    _sum_by_paths(
                        scores, total, sunk, first, rows, wide, begin, cached, group, new, tree,
                        parents,
                    )  # fmt: skip
                for d in range(0, dim, columns):
                    d = min(d, dim - columns)  # the last columns may be computed twice
                    at = base + least * dim + d
                    _multiply(
                        rows, columns, block, d, dim, scores, least, wide, values, at, dim,
                        seen - least,
                    )  # fmt: skip
                _scatter(out, block, total, start, first, rows, head, heads, group, dim)


@njit(cache=True, error_model="numpy")
def _next(spans, i, head, kv_heads):
    """Return the span and head after this one, whose keys and values are to be prefetched."""
    if head + 1 < kv_heads:
        return spans[i], head + 1
    return spans[min(i + 1, len(spans) - 1)], 0


@njit(inline="always")
def first_seen(position, reach):
    """Return the first position that a token at `position` sees."""
    return max(0, position - reach[0] + 1, position // reach[1] * reach[1])


@njit(inline="always")
def _panel(cached, reach):
    return first_seen(cached, reach) // PANEL * PANEL


@njit(inline="always")
def _prefetch(keys, values, start, count):
    for place in range(start, start + count, _LINE // keys.itemsize):
        prefetch(keys, place)
        prefetch(values, place)


@njit(inline="always")
def _multiply(rows, columns, out, o, out_row, left, a, left_row, right, b, right_step, depth):
    """Set `rows` by `columns` of `out` to the product of `left`'s rows and `right`."""
    if columns == PANEL:
        row_tile_32(rows, out, o, out_row, left, a, left_row, 1, right, b, right_step, depth)
    elif columns == LANES:
        row_tile_16(rows, out, o, out_row, left, a, left_row, 1, right, b, right_step, depth)
    else:
        row_tile_8(rows, out, o, out_row, left, a, left_row, 1, right, b, right_step, depth)


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
def _mask(scores, first, rows, wide, begin, cached, group, new, tree, parents, reach):
    """Hide tokens that are later or out of reach and, in a tree, those that are no ancestors."""
    nodes = parents[tree] if tree >= 0 else 0
    root = cached + new - nodes
    for r in range(rows):
        place = cached + (first + r) // group
        row = scores[r * wide :][:wide]
        row[place + 1 :] = UNSEEN
        node = place - root
        if node < 0:
            row[begin : first_seen(place, reach)] = UNSEEN
            continue
        position, ancestor = root, parents[tree + 1 + node]
        while ancestor >= 0:
            position += 1
            ancestor = parents[tree + 1 + ancestor]
        seen = first_seen(position, reach)
        row[begin : min(seen, root)] = UNSEEN
        ancestor = node
        for other in range(node, -1, -1):
            if other == ancestor:
                ancestor = parents[tree + 1 + other]
                if position < seen:
                    row[root + other] = UNSEEN
                position -= 1
            else:
                row[root + other] = UNSEEN


@njit(cache=True, fastmath=_MATH, error_model="numpy")
def capped(scores, cap):
    """Turn scores x, a multiple of `LANES` of them, into cap * tanh(x / cap)."""
    for place in range(0, len(scores), LANES):
        part = scores[place:][:LANES]
        for j in range(LANES):
            e = exp_of_negative(np.float32(-2) * abs(part[j]) / cap)
            most = cap * (np.float32(1) - e) / (np.float32(1) + e)
            part[j] = -most if part[j] < 0 else most


@njit(cache=True, fastmath=_MATH, error_model="numpy")
def _softmax(scores, total, sunk, rows, wide, begin, sinks, first, group):
    """Turn scores [rows, wide] into weights exp(score - greatest of its row), and sum them; `sunk`
    is what the sink adds."""
    greatest, sums = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    for r in range(rows):
        greatest[:] = UNSEEN
        sums[:] = np.float32(0)
        for place in range(r * wide + begin, (r + 1) * wide, LANES):
            part = scores[place:][:LANES]
            for j in range(LANES):
                greatest[j] = greatest[j] if greatest[j] > part[j] else part[j]
        sink = sinks[(first + r) % group]
        most = max(greatest.max(), sink)
        for place in range(r * wide + begin, (r + 1) * wide, LANES):
            part = scores[place:][:LANES]
            for j in range(LANES):
                weight = exp_of_negative(part[j] - most)
                part[j] = weight
                sums[j] += weight
        sunk[r] = exp_of_negative(sink - most)
        total[r] = sums.sum() + sunk[r]


@njit(inline="always")
def exp_of_negative(x):
    """Return exp(x) of x <= 0 to 2 ulp, as 2^n times a polynomial of the rest; vectorisable.

    The polynomial is Taylor's up to x^7: |x - n log 2| <= log(2) / 2 leaves an error of less than
    1e-8. log 2 is subtracted in two parts, since n times the first is exact. NaN stays NaN. The
    caller's `fastmath` must not reorder sums."""
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
def _sum_by_paths(scores, total, sunk, first, rows, wide, begin, cached, group, new, tree, parents):
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
        for place in range(begin, root - LANES + 1, LANES):
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
        total[r] = sums.sum() + sunk[r]
