"""The numbers that a tensor's bits are multiplied by in its hash.

The hash is the sum over the tensor's 16-bit units (whatever its dtype: a bfloat16 is one, a float32
is two), modulo 2**64, of

    outer(i // 1024) * INNER[i % 1024] * unit i

with fixed random odd numbers: multilinear hashing (Lemire and Kaser, "Strongly universal string
hashing is fast", arXiv 1202.4961) with keys that are products. A unit's share depends on its place
and its bits alone, so hashes of parts add up to that of the whole, and what a change of some units
adds is known without the others.

How good it is: one changed unit is always found, as keys are odd. Of other differences a share of
about 2**-47 goes unseen, over random keys: units differ by less than 2**16, so powers of two take
at most 15 of the 64 bits. It guards against torn copies, stale tensors and bugs, not against
somebody who knows the keys.
"""

from __future__ import annotations

import numpy as np

HASH_BLOCK = 1024
"""Units that share an outer key; their inner keys stay in a core's first cache."""
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mixed(numbers: np.ndarray) -> np.ndarray:
    """Random odd numbers, one for each of these [n] uint64 (SplitMix64, Steele et al. 2014)."""
    z = (numbers + np.uint64(1)) * np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def outer(first: int, count: int) -> np.ndarray:
    """Keys of blocks `first` to `first + count`, [count] uint64."""
    return mixed(np.arange(first, first + count, dtype=np.uint64))


INNER = mixed(np.arange(HASH_BLOCK, dtype=np.uint64) + np.uint64(1 << 63))
"""[1024] uint64."""


def hash_units(units: np.ndarray, start: int) -> int:
    """`kernels.hash_units` in numpy: takes ten times as long, but loads no compiled code."""
    lead = start % HASH_BLOCK
    rows = -(-(lead + len(units)) // HASH_BLOCK)
    table = np.zeros(rows * HASH_BLOCK, np.uint64)
    table[lead : lead + len(units)] = units
    shares = (table.reshape(rows, HASH_BLOCK) * INNER).sum(1, dtype=np.uint64)
    return int((shares * outer(start // HASH_BLOCK, rows)).sum(dtype=np.uint64))
