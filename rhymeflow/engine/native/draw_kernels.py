"""Drawing tokens on CPUs: what `noise.draw` defines, row by row, compiled.

A row is some hundred instructions where the vocabulary is small; by tensors it is some sixty calls,
whose cost is the same for one row as for a hundred.

Holds true: a token is the one that `noise.draw` defines; a row's result depends on the row alone.
Knows nothing of torch, sequences or temperatures.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_SLACK = 1e-9
"""Covers a logarithm that is not monotone in its last bit."""
_COMPILED = {"cache": True, "nogil": True, "error_model": "numpy"}


@njit(**_COMPILED)
def draw(x, keys, noise, first, last, tokens):
    """Set `tokens` int64 [R] of rows `first` to `last`: argmax over v of x - log E.

    `x` float32 [R, V]; `keys` uint64 [R]. `noise`: (block, counter of block 0, step, rounds, last
    shift) as `noise.py` defines them. Of two tokens that score the same it is the smaller one.
    """
    for r in range(first, last):
        tokens[r] = _winner(x[r], keys[r], noise)


@njit(inline="always")
def _winner(row, key, noise):
    size, first_block = noise[0], noise[1]
    num_blocks = -(-len(row) // size)
    bounds = np.empty(num_blocks)
    best_guess = -np.inf
    for b in range(num_blocks):
        word = _word(key, first_block + np.uint64(b), noise)
        least, where = _exponential(word) / size, b * size + np.int64(word & np.uint64(size - 1))
        log_least = np.log(least)
        bounds[b] = np.float64(_greatest(row[b * size :][:size])) - log_least
        if where < len(row):
            best_guess = max(best_guess, np.float64(row[where]) - log_least)
    winner, best = len(row), -np.inf
    for b in range(num_blocks):
        if bounds[b] < best_guess - _SLACK or bounds[b] == -np.inf:
            continue
        word = _word(key, first_block + np.uint64(b), noise)
        least, where = _exponential(word) / size, b * size + np.int64(word & np.uint64(size - 1))
        log_least = np.log(least)
        for v in range(b * size, min((b + 1) * size, len(row))):
            most = np.float64(row[v]) - log_least
            if v == where:
                score = most
            elif most < best - _SLACK or most < best_guess - _SLACK:
                continue
            else:
                score = np.float64(row[v]) - np.log(
                    least + _exponential(_word(key, np.uint64(v), noise))
                )
            if score > best:
                winner, best = v, score
    return winner


@njit(inline="always")
def _word(key, counter, noise):
    """Hash of key and counter."""
    step, rounds, last_shift = noise[2:]
    word = key + (counter + np.uint64(1)) * step
    for shift, factor in rounds:
        word = (word ^ (word >> shift)) * factor
    return word ^ (word >> last_shift)


@njit(inline="always")
def _exponential(word):
    """Exponential(1) of a word's upper 52 bits."""
    return -np.log1p((np.float64(word >> np.uint64(12)) + 0.5) * -(2.0**-52))


@njit(cache=True, fastmath={"nnan", "nsz"})
def _greatest(row):
    greatest = np.float32(-np.inf)
    for v in range(len(row)):
        greatest = row[v] if row[v] > greatest else greatest
    return greatest


__all__ = ["draw"]
