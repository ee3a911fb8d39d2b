"""Attention within the sequences of a packed row and its gradient, compiled for CPUs.

For a sequence and a key-value head, the queries in all query heads that share that head are the
columns of small matrices, 32 each; scores are the keys' products with them. A token that several
sequences share is a query once. The backward pass recomputes the weights from the logs of their
sums, as FlashAttention does (arXiv 2205.14135, section 3.1). Keys before those that a block of
queries sees are left out. A sink is in the log of the sum, and nowhere else."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from rhymeflow.cpu.attention import UNSEEN, capped, exp_of_negative, first_seen
from rhymeflow.cpu.tiles import (
    BYTES,
    LANES,
    ROWS,
    add_tile_16,
    add_tile_32,
    tile_16,
    tile_32,
    transpose,
)

BLOCK = 2 * LANES  # most queries per block
_FLOATS = BYTES // np.dtype(np.float32).itemsize
_COMPILED = {
    "cache": True,
    "nogil": True,
    # Without reordering of sums, which would break the rounding in `exp_of_negative`.
    "fastmath": {"contract", "nsz", "arcp"},
    "error_model": "numpy",
}


class Room(NamedTuple):
    """Working memory for sequences of up to L tokens; flat float32 arrays."""

    k: np.ndarray  # [L, D], as `v`, `sum_k` and `sum_v`
    v: np.ndarray
    sum_k: np.ndarray
    sum_v: np.ndarray
    q: np.ndarray  # [BLOCK, D], as `g` and `o`
    g: np.ndarray
    o: np.ndarray
    columns: np.ndarray  # [D, BLOCK]
    p: np.ndarray  # [L, BLOCK], as `s`
    s: np.ndarray
    first: np.ndarray  # [BLOCK], as `second`: a number for each query of a block
    second: np.ndarray


def room(longest: int, head_dim: int) -> Room:
    """Return `room` for both kernels, for sequences of up to `longest` tokens."""
    length = -(-longest // ROWS) * ROWS
    # In the order of the fields.
    sizes = [*[length * head_dim] * 4, *[BLOCK * head_dim] * 4, *[BLOCK * length] * 2, BLOCK, BLOCK]
    return Room(*(np.zeros(size, np.float32) for size in sizes))


@njit(**_COMPILED)
def attend(q, k, v, out, log_sums, scale, reach, cap, sinks, sizes, items, places, room):
    """Fill `out` and `log_sums`, the log of the sum of each query's exponentials, for every item.

    `q`, `out` [T * H * D], `k`, `v` [T * G * D] and `log_sums` [T * H] are the packed row, float32.
    `reach`, `cap` and `sinks` are from `attention.limits`. `sizes` is (H, G, D), D a multiple of
    `LANES`. `places` has the row indices of all sequences' tokens. `items`, int64 [n, 4]: a
    key-value head, a sequence's start in `places` and its length, and the first of its tokens that
    is a query."""
    heads, kv_heads, dim = sizes
    group = heads // kv_heads
    one, largest, total = np.float32(1), room.first, room.second
    for i in range(len(items)):
        head, begin, length, start = items[i]
        tokens = places[begin:][:length]
        _block(room.k, k, tokens, 0, length, head, kv_heads, 1, dim, one)
        _block(room.v, v, tokens, 0, length, head, kv_heads, 1, dim, one)
        for first in range(start * group, length * group, BLOCK):
            rows = min(BLOCK, length * group - first)
            seen, begin = (first + rows - 1) // group + 1, _first_tile(first, group, reach)
            _block(room.q, q, tokens, first, rows, head, heads, group, dim, scale)
            _by_columns(room.p, room.k, room.q, room.columns, rows, begin, seen, dim)
            if cap > 0:
                capped(room.p[begin * BLOCK : _whole_tiles(seen) * BLOCK], cap)
            _hide(room.p, first, begin, seen, group, reach)
            for r in range(0, rows, LANES):
                _weigh(room.p[r:], begin, seen, largest[r:], total[r:])
            _weighted(room.o, room.p, room.v, rows, dim, begin, seen)
            for r in range(rows):
                token, of_group = divmod(first + r, group)
                at = tokens[token] * heads + head * group + of_group
                sink = sinks[head * group + of_group]
                most = max(largest[r], sink)
                kept = np.float32(np.exp(largest[r] - most))
                every = total[r] * kept + np.float32(np.exp(sink - most))
                log_sums[at] = most + np.float32(np.log(every))
                share = kept / every
                row, source = out[at * dim :][:dim], room.o[r * dim :][:dim]
                for d in range(dim):
                    row[d] = source[d] * share


@njit(**_COMPILED)
def differentiate(
    q, k, v, out, log_sums, grad, grad_q, grad_k, grad_v, scale, reach, cap, sinks, sizes, items,
    places, owners, room,
):  # fmt: skip
    """Set `grad_q`, and add to `grad_k` and `grad_v`, given `grad`, the gradient by `out`. `owners`
    has, for each of `places`, the row of these two to which its token's is added. The other
    arguments are those of `attend`, after it has run."""
    heads, kv_heads, dim = sizes
    group = heads // kv_heads
    one, log_sum, inner = np.float32(1), room.first, room.second
    for i in range(len(items)):
        head, begin, length, start = items[i]
        tokens, into = places[begin:][:length], owners[begin:][:length]
        _block(room.k, k, tokens, 0, length, head, kv_heads, 1, dim, one)
        _block(room.v, v, tokens, 0, length, head, kv_heads, 1, dim, one)
        room.sum_k[: _whole_tiles(length) * dim] = np.float32(0)
        room.sum_v[: _whole_tiles(length) * dim] = np.float32(0)
        for first in range(start * group, length * group, BLOCK):
            rows = min(BLOCK, length * group - first)
            seen, begin = (first + rows - 1) // group + 1, _first_tile(first, group, reach)
            _block(room.q, q, tokens, first, rows, head, heads, group, dim, scale)
            _block(room.g, grad, tokens, first, rows, head, heads, group, dim, one)
            _block(room.o, out, tokens, first, rows, head, heads, group, dim, one)
            _by_columns(room.p, room.k, room.q, room.columns, rows, begin, seen, dim)
            _by_columns(room.s, room.v, room.g, room.columns, rows, begin, seen, dim)
            for r in range(rows):
                token, of_group = divmod(first + r, group)
                log_sum[r] = log_sums[tokens[token] * heads + head * group + of_group]
                inner[r] = _inner(room.g[r * dim :][:dim], room.o[r * dim :][:dim])
            if cap > 0:
                capped(room.p[begin * BLOCK : _whole_tiles(seen) * BLOCK], cap)
                for r in range(0, rows, LANES):
                    _cap_slopes(room.p[r:], room.s[r:], begin, _whole_tiles(seen), inner[r:], cap)
            _hide(room.p, first, begin, seen, group, reach)
            for r in range(0, rows, LANES):
                _slope(room.p[r:], room.s[r:], begin, _whole_tiles(seen), log_sum[r:], inner[r:])
            _weighted(room.o, room.s, room.k, rows, dim, begin, seen)
            for r in range(rows):
                token, of_group = divmod(first + r, group)
                at = (tokens[token] * heads + head * group + of_group) * dim
                row, source = grad_q[at:][:dim], room.o[r * dim :][:dim]
                for d in range(dim):
                    row[d] = source[d] * scale
            _add_products(room.sum_k, room.s, room.q, rows, begin, seen, dim)
            _add_products(room.sum_v, room.p, room.g, rows, begin, seen, dim)
        _scatter_add(grad_k, room.sum_k, into, head, kv_heads, dim)
        _scatter_add(grad_v, room.sum_v, into, head, kv_heads, dim)


@njit(inline="always")
def _by_columns(out, left, right, columns, rows, begin, seen, dim):
    """Set out[seen, BLOCK] to left[seen, D] times the transpose of right[rows, D], from `begin`."""
    for r in range(0, rows, LANES):
        for d in range(0, dim, _FLOATS):
            transpose(columns, d * BLOCK + r, BLOCK, right, r * dim + d, dim)
    for place in range(begin, seen, ROWS):
        a, o = place * dim, place * BLOCK
        if rows > LANES:
            tile_32(ROWS, out, o, BLOCK, left, a, dim, 1, columns, 0, BLOCK, dim)
        else:
            tile_16(ROWS, out, o, BLOCK, left, a, dim, 1, columns, 0, BLOCK, dim)


@njit(inline="always")
def _weighted(out, weights, x, rows, dim, begin, seen):
    """Set out[rows, D] to the transpose of weights[seen, rows] times x[seen, D], from `begin`."""
    depth, b = seen - begin, begin * dim
    for row in range(0, rows, ROWS):
        o, a, d = row * dim, begin * BLOCK + row, 0
        while dim - d > LANES:
            tile_32(ROWS, out, o + d, dim, weights, a, 1, BLOCK, x, b + d, dim, depth)
            d += 2 * LANES
        if d < dim:
            tile_16(ROWS, out, o + d, dim, weights, a, 1, BLOCK, x, b + d, dim, depth)


@njit(inline="always")
def _add_products(sums, left, right, rows, begin, seen, dim):
    """Add left[seen, rows] times right[rows, D] to sums[seen, D], from `begin`."""
    for place in range(begin, seen, ROWS):
        a, d = place * BLOCK, 0
        while dim - d > LANES:
            add_tile_32(ROWS, sums, place * dim + d, dim, left, a, BLOCK, 1, right, d, dim, rows)
            d += 2 * LANES
        if d < dim:
            add_tile_16(ROWS, sums, place * dim + d, dim, left, a, BLOCK, 1, right, d, dim, rows)


@njit(inline="always")
def _whole_tiles(seen):
    return -(-seen // ROWS) * ROWS


@njit(inline="always")
def _first_tile(first, group, reach):
    """Return the start of the first tile of keys that a block's queries see."""
    return first_seen(first // group, reach) // ROWS * ROWS


@njit(**_COMPILED)
def _hide(scores, first, begin, seen, group, reach):
    """Hide from each query the keys after its token, up to the end of the last tile, and those out
    of its reach."""
    for place in range(max(begin, first // group + 1), _whole_tiles(seen)):
        scores[place * BLOCK :][: min(BLOCK, place * group - first)] = UNSEEN
    for place in range(begin, first_seen(seen - 1, reach)):
        # The first token that no longer sees this key; nor do those after it.
        far = min(place + reach[0], (place // reach[1] + 1) * reach[1])
        scores[place * BLOCK :][max(0, min(BLOCK, far * group - first)) : BLOCK] = UNSEEN


# Each loop of these three uses few arrays: with more, the compiler must assume that they overlap.
@njit(**_COMPILED)
def _weigh(scores, begin, seen, largest, total):
    """Turn `LANES` columns of scores into exp(score - largest of its column), and sum them."""
    largest, total = largest[:LANES], total[:LANES]
    largest[:] = UNSEEN
    total[:] = np.float32(0)
    for place in range(begin * BLOCK, seen * BLOCK, BLOCK):
        row = scores[place:][:LANES]
        for j in range(LANES):
            largest[j] = row[j] if row[j] > largest[j] else largest[j]
    for place in range(begin * BLOCK, seen * BLOCK, BLOCK):
        row = scores[place:][:LANES]
        for j in range(LANES):
            row[j] = exp_of_negative(row[j] - largest[j])
        for j in range(LANES):
            total[j] += row[j]


@njit(**_COMPILED)
def _cap_slopes(scores, slopes, begin, seen, inner, cap):
    """Turn the gradient by the weights, in `LANES` columns of `slopes`, into `slopes - inner` times
    the derivative of the capped scores by the scores; `inner` becomes 0."""
    inner = inner[:LANES]
    for place in range(begin * BLOCK, seen * BLOCK, BLOCK):
        row, slope = scores[place:][:LANES], slopes[place:][:LANES]
        for j in range(LANES):
            share = row[j] / cap
            slope[j] = (slope[j] - inner[j]) * (np.float32(1) - share * share)
    inner[:] = np.float32(0)


@njit(**_COMPILED)
def _slope(scores, slopes, begin, seen, log_sums, inner):
    """Turn `LANES` columns of scores into weights exp(score - log sum), and the gradient by the
    weights, in `slopes`, into that by the scores: weight * (slope - inner)."""
    log_sums, inner = log_sums[:LANES], inner[:LANES]
    for place in range(begin * BLOCK, seen * BLOCK, BLOCK):
        row, slope = scores[place:][:LANES], slopes[place:][:LANES]
        for j in range(LANES):
            row[j] = exp_of_negative(row[j] - log_sums[j])
        for j in range(LANES):
            slope[j] -= inner[j]
        for j in range(LANES):
            slope[j] *= row[j]


# A dot product vectorises only if its sum may be reordered.
@njit(cache=True, fastmath={"contract", "reassoc"})
def _inner(a, b):
    total = np.float32(0)
    for d in range(len(a)):
        total += a[d] * b[d]
    return total


@njit(**_COMPILED)
def _scatter_add(x, rows, tokens, head, num_heads, dim):
    for i in range(len(tokens)):
        row, target = rows[i * dim :][:dim], x[(tokens[i] * num_heads + head) * dim :][:dim]
        for d in range(dim):
            target[d] += row[d]


@njit(**_COMPILED)
def _block(into, x, tokens, first, rows, head, heads, group, dim, scale):
    """Copy the vectors of rows from `first`, times `scale`: row r is the group's head r % group, of
    token r // group."""
    for r in range(rows):
        token, of_group = divmod(first + r, group)
        row = into[r * dim :][:dim]
        source = x[(tokens[token] * heads + head * group + of_group) * dim :][:dim]
        for d in range(dim):
            row[d] = source[d] * scale
