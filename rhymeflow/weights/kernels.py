"""Compiled loops that hash weights, find changes between two versions, and apply them.

Tensors are read as 16-bit units, and hashed as in `proof.py`. No index is checked: callers ensure
that arrays fit."""

from __future__ import annotations

import numpy as np

from rhymeflow.utils import code_cache

code_cache.ensure()  # before numba is imported

from numba import int64, njit, uint64  # noqa: E402

from rhymeflow.cpu.tiles import prefetch  # noqa: E402
from rhymeflow.weights.changes import BLOCK  # noqa: E402
from rhymeflow.weights.proof import GOLDEN, HASH_BLOCK, MIX_1, MIX_2  # noqa: E402

_GROUP = 32  # units that are compared before a branch
_MANY = BLOCK // 32
"""After a block with more changes than this, the next one is searched without branches."""
_AHEAD = 64  # how many changes ahead memory is prefetched

compiled = njit(cache=True, nogil=True, error_model="numpy", _nrt=False)
inlined = njit(cache=True, nogil=True, error_model="numpy", _nrt=False, inline="always")


@inlined
def _outer(block):
    z = (uint64(block) + uint64(1)) * uint64(GOLDEN)
    z = (z ^ (z >> uint64(30))) * uint64(MIX_1)
    z = (z ^ (z >> uint64(27))) * uint64(MIX_2)
    return (z ^ (z >> uint64(31))) | uint64(1)


@compiled
def hash_units(units, start, inner):
    """Return what these units, from unit `start` of their tensor, add to its hash."""
    count, first = len(units), start % HASH_BLOCK
    head = min(count, HASH_BLOCK - first) if first else 0
    total = _part(units[:head], start // HASH_BLOCK, inner[first:])
    block, num_blocks = (start + head) // HASH_BLOCK, (count - head) // HASH_BLOCK
    rest = units[head:]
    for b in range(num_blocks):
        share = uint64(0)
        for j in range(HASH_BLOCK):  # the constant length makes it twice as fast
            share += inner[j] * uint64(rest[b * HASH_BLOCK + j])
        total += _outer(block + b) * share
    return total + _part(rest[num_blocks * HASH_BLOCK :], block + num_blocks, inner)


@inlined
def _part(units, block, inner):
    share = uint64(0)
    for j in range(len(units)):
        share += inner[j] * uint64(units[j])
    return _outer(block) * share


@compiled
def find_changes(new, old, counts, places, values, most):
    """Find the units of `new` [n] that differ from `old` [n], in order; return their number.

    Sets `counts` [n / BLOCK, rounded up] to their number in each block and, if there are at most
    `most`, `places` and `values` to their indices in their blocks and their new values; these two
    have room for `most` + BLOCK."""
    found, expects_many = int64(0), False
    for block in range(len(counts)):
        a = new[block * BLOCK : (block + 1) * BLOCK]
        b = old[block * BLOCK : (block + 1) * BLOCK]
        if found > most:
            count = _count(a, b)
        elif expects_many:
            count = _find_many(a, b, places[found:], values[found:])
        else:
            count = _find_few(a, b, places[found:], values[found:])
        expects_many = count > _MANY
        counts[block] = count
        found += count
    return int64(found)


@compiled
def _count(a, b):
    count = 0
    for i in range(len(a)):
        count += a[i] != b[i]
    return count


@compiled
def _find_many(a, b, places, values):
    """Find changes without branches, which would be mispredicted."""
    found = uint64(0)
    for i in range(len(a)):
        places[found] = i
        values[found] = a[i]
        found += uint64(a[i] != b[i])
    return int64(found)


@compiled
def _find_few(a, b, places, values):
    found = uint64(0)
    groups = len(a) // _GROUP
    # Four units at a time: LLVM does not vectorise a search.
    a4, b4 = a[: groups * _GROUP].view(np.uint64), b[: groups * _GROUP].view(np.uint64)
    for group in range(groups):
        first, differs = group * (_GROUP // 4), uint64(0)
        for word in range(first, first + _GROUP // 4):
            differs |= a4[word] ^ b4[word]
        if not differs:
            continue
        for word in range(first, first + _GROUP // 4):
            if a4[word] != b4[word]:
                for i in range(4 * word, 4 * word + 4):
                    if a[i] != b[i]:
                        places[found] = i
                        values[found] = a[i]
                        found += uint64(1)
    for i in range(groups * _GROUP, len(a)):
        if a[i] != b[i]:
            places[found] = i
            values[found] = a[i]
            found += uint64(1)
    return int64(found)


@compiled
def changes_within(counts, places, values, first, start, length, runs, stride, into):
    """Keep the changes of `runs` of `length` units, the first at unit `start` of the tensor, each
    `stride` after the one before, of changes of a part that begins at unit `first`. Sets `into`,
    arrays as `counts`, `places` and `values`, but of a single run, whose changes lie together, the
    counts alone; returns where the first of those kept is, and how many there are."""
    new_counts, new_places, new_values = into
    found, kept = int64(0), int64(0)
    block, block_start = int64(0), int64(0)  # and number of the changes before it
    for run in range(runs):
        low = max(int64(0), start + run * stride - first)
        high = min(start + run * stride + length - first, len(counts) * BLOCK)
        while low < high:
            while block < low // BLOCK:
                block_start += counts[block]
                block += 1
            of_block = places[block_start : block_start + counts[block]]
            end = min(high, (block + 1) * BLOCK)
            a = np.searchsorted(of_block, low - block * BLOCK)
            b = np.searchsorted(of_block, end - block * BLOCK)
            found = found if kept else block_start + a
            if runs > 1:
                for k in range(b - a):
                    new_places[kept + k] = places[block_start + a + k]
                    new_values[kept + k] = values[block_start + a + k]
            new_counts[block] += b - a
            kept += b - a
            low = end
    return found, kept


@compiled
def put_changes(units, counts, places, values, inner, start):
    """Set the units that `find_changes` found in the part of `units` from unit `start` on; return
    what this adds to the hash."""
    total, share, last = uint64(0), uint64(0), uint64(0)
    k, end = uint64(0), uint64(len(places) - 1)
    for block in range(len(counts)):
        first = uint64(start + block * BLOCK)
        for _ in range(counts[block]):
            prefetch(units, first + places[min(k + uint64(_AHEAD), end)])
            i = first + uint64(places[k])
            if (i >> uint64(10)) != last:  # another block of the hash, of 1 << 10 units
                total += share * _outer(last)
                share, last = uint64(0), i >> uint64(10)
            share += inner[i & uint64(1023)] * (uint64(values[k]) - uint64(units[i]))
            units[i] = values[k]
            k += uint64(1)
    return total + share * _outer(last)
