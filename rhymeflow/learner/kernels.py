"""Attention within the sequences of a packed row and its gradient, compiled for CPUs.

For a sequence and a key-value head, the vectors of its query tokens in the query heads that share
the head are the rows of a small matrix, 32 at a time; scores are its product with the keys'
transpose. Nothing is padded but the last block and the last keys, what comes after a block's last
token is not computed, and a token that several sequences share is a query once. The backward pass
computes the weights anew from the log of their sums, as FlashAttention does (arXiv 2205.14135,
section 3.1).

Holds true: sums are in float32, each in an order that depends on its own sequence, and for a shared
token on the sequences it is in, alone. Knows nothing of torch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from rhymeflow.utils.fast_exp import exp_of_negative
from rhymeflow.utils.gemm import LANES, ROWS, add_tile_16, add_tile_32, tile_16, tile_32

BLOCK = 32
"""Most queries at a time."""
_COMPILED = {
    "cache": True,
    "nogil": True,
    "fastmath": {"contract", "nsz", "arcp", "reassoc"},
    "error_model": "numpy",
}


class Room(NamedTuple):
    """Working memory for sequences of up to so many tokens."""

    k: np.ndarray
    """[L, D], as `v`, `sum_k` and `sum_v`."""
    v: np.ndarray
    sum_k: np.ndarray
    sum_v: np.ndarray
    k_columns: np.ndarray
    """[D, L]."""
    v_columns: np.ndarray
    q: np.ndarray
    """[BLOCK, D], as `g` and `o`."""
    g: np.ndarray
    o: np.ndarray
    p: np.ndarray
    """[BLOCK, L]."""
    s: np.ndarray


def room(longest: int, head_dim: int) -> Room:
    """What both kernels take as `room`."""
    length = -(-longest // BLOCK) * BLOCK
    sizes = [*[length * head_dim] * 6, *[BLOCK * head_dim] * 3, *[BLOCK * length] * 2]
    return Room(*(np.zeros(size, np.float32) for size in sizes))


@njit(**_COMPILED)
def attend(q, k, v, out, log_sums, scale, sizes, items, places, room):
    """Fill `out` and `log_sums`, the log of the sum of each query's exponentials, for every item.

    `q`, `out` [T * H * D], `k`, `v` [T * G * D] and `log_sums` [T * H] are the packed row, float32;
    `sizes`: (H, G, D), D a multiple of `LANES`. `items` int64 [n, 4]: a key-value head; where in
    `places` a sequence's tokens begin, and how many there are; the first of them that is a query.
    """
    heads, kv_heads, dim = sizes
    group = heads // kv_heads
    for i in range(len(items)):
        head, begin, length, start = items[i]
        tokens = places[begin:][:length]
        width = -(-length // LANES) * LANES
        _take_columns(room.k_columns, k, tokens, width, head, kv_heads, dim)
        _take(room.v, v, tokens, head, kv_heads, dim)
        for first in range(start * group, length * group, BLOCK):
            rows = min(BLOCK, length * group - first)
            seen = (first + rows - 1) // group + 1
            _block(room.q, q, tokens, first, rows, head, heads, group, dim, scale)
            _multiply(room.p, room.q, dim, 1, room.k_columns, width, rows, seen, dim, width)
            for r in range(rows):
                own = (first + r) // group
                weights = room.p[r * width :][:width]
                largest = _largest(weights[: own + 1])
                total = np.float32(0)
                for place in range(own + 1):
                    weight = exp_of_negative(weights[place] - largest)
                    weights[place] = weight
                    total += weight
                weights[own + 1 : seen] = np.float32(0)
                at = tokens[own] * heads + head * group + (first + r) % group
                log_sums[at] = largest + np.float32(np.log(total))
                room.s[r] = np.float32(1) / total
            _multiply(room.o, room.p, width, 1, room.v, dim, rows, dim, seen, dim)
            for r in range(rows):
                token, of_group = divmod(first + r, group)
                at = (tokens[token] * heads + head * group + of_group) * dim
                row, source, share = out[at:][:dim], room.o[r * dim :][:dim], room.s[r]
                for d in range(dim):
                    row[d] = source[d] * share


@njit(**_COMPILED)
def differentiate(
    q, k, v, out, log_sums, grad, grad_q, grad_k, grad_v, scale, sizes, items, places, room
):
    """From `grad`, the loss's by `out`, fill `grad_q`, and add to `grad_k` and `grad_v`.

    The other arguments are those of `attend`, after it.
    """
    heads, kv_heads, dim = sizes
    group = heads // kv_heads
    one = np.float32(1)
    for i in range(len(items)):
        head, begin, length, start = items[i]
        tokens = places[begin:][:length]
        width = -(-length // LANES) * LANES
        _take(room.k, k, tokens, head, kv_heads, dim)
        _take_columns(room.k_columns, k, tokens, width, head, kv_heads, dim)
        _take_columns(room.v_columns, v, tokens, width, head, kv_heads, dim)
        room.sum_k[: width * dim] = np.float32(0)
        room.sum_v[: width * dim] = np.float32(0)
        for first in range(start * group, length * group, BLOCK):
            rows = min(BLOCK, length * group - first)
            seen = (first + rows - 1) // group + 1
            _block(room.q, q, tokens, first, rows, head, heads, group, dim, scale)
            _block(room.g, grad, tokens, first, rows, head, heads, group, dim, one)
            _block(room.o, out, tokens, first, rows, head, heads, group, dim, one)
            _multiply(room.p, room.q, dim, 1, room.k_columns, width, rows, seen, dim, width)
            _multiply(room.s, room.g, dim, 1, room.v_columns, width, rows, seen, dim, width)
            for r in range(rows):
                own = (first + r) // group
                log_sum = log_sums[tokens[own] * heads + head * group + (first + r) % group]
                given, made = room.g[r * dim :][:dim], room.o[r * dim :][:dim]
                inner = np.float32(0)
                for d in range(dim):
                    inner += given[d] * made[d]
                weights, slopes = room.p[r * width :][:width], room.s[r * width :][:width]
                for place in range(own + 1):
                    weight = exp_of_negative(weights[place] - log_sum)
                    weights[place] = weight
                    slopes[place] = weight * (slopes[place] - inner)
                weights[own + 1 :] = np.float32(0)
                slopes[own + 1 :] = np.float32(0)
            _multiply(room.o, room.s, width, 1, room.k, dim, rows, dim, seen, dim)
            for r in range(rows):
                token, of_group = divmod(first + r, group)
                at = (tokens[token] * heads + head * group + of_group) * dim
                row, source = grad_q[at:][:dim], room.o[r * dim :][:dim]
                for d in range(dim):
                    row[d] = source[d] * scale
            _add_products(room.sum_k, room.s, room.q, rows, seen, dim, width)
            _add_products(room.sum_v, room.p, room.g, rows, seen, dim, width)
        _give(grad_k, room.sum_k, tokens, head, kv_heads, dim)
        _give(grad_v, room.sum_v, tokens, head, kv_heads, dim)


@njit(inline="always")
def _multiply(out, left, left_row, left_step, right, right_row, rows, columns, depth, out_row):
    """out[rows, columns] = left[rows, depth] times right[depth, columns], whole tiles of it."""
    for row in range(0, rows, ROWS):
        a, o, column = row * left_row, row * out_row, 0
        while columns - column > LANES:
            tile_32(
                out, o + column, out_row, left, a, left_row, left_step,
                right, column, right_row, depth,
            )  # fmt: skip
            column += 2 * LANES
        if column < columns:
            tile_16(
                out, o + column, out_row, left, a, left_row, left_step,
                right, column, right_row, depth,
            )  # fmt: skip


@njit(inline="always")
def _add_products(sums, left, right, rows, seen, dim, width):
    """Add to sums [seen, D] the transpose of left [rows, seen] times right [rows, D]."""
    for place in range(0, seen, ROWS):
        d = 0
        while dim - d > LANES:
            add_tile_32(sums, place * dim + d, dim, left, place, 1, width, right, d, dim, rows)
            d += 2 * LANES
        if d < dim:
            add_tile_16(sums, place * dim + d, dim, left, place, 1, width, right, d, dim, rows)


@njit(**_COMPILED)
def _largest(x):
    largest = x[0]
    for i in range(1, len(x)):
        largest = largest if largest > x[i] else x[i]
    return largest


@njit(**_COMPILED)
def _take(rows, x, tokens, head, num_heads, dim):
    """The tokens' vectors of one head, one after another."""
    for i in range(len(tokens)):
        row, source = rows[i * dim :][:dim], x[(tokens[i] * num_heads + head) * dim :][:dim]
        for d in range(dim):
            row[d] = source[d]


@njit(**_COMPILED)
def _take_columns(columns, x, tokens, width, head, num_heads, dim):
    """The same as columns of a matrix [D, width]; those that are no token's are finite."""
    for i in range(len(tokens)):
        source = x[(tokens[i] * num_heads + head) * dim :][:dim]
        for d in range(dim):
            columns[d * width + i] = source[d]


@njit(**_COMPILED)
def _give(x, rows, tokens, head, num_heads, dim):
    """Add rows to the tokens' vectors of one head."""
    for i in range(len(tokens)):
        row, target = rows[i * dim :][:dim], x[(tokens[i] * num_heads + head) * dim :][:dim]
        for d in range(dim):
            target[d] += row[d]


@njit(**_COMPILED)
def _block(into, x, tokens, first, rows, head, heads, group, dim, scale):
    """A block's vectors: row r is query head r % group of token r // group."""
    for r in range(rows):
        token, of_group = divmod(first + r, group)
        row = into[r * dim :][:dim]
        source = x[(tokens[token] * heads + head * group + of_group) * dim :][:dim]
        for d in range(dim):
            row[d] = source[d] * scale


__all__ = ["attend", "differentiate", "room"]
