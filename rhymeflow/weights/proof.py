"""What proves a copy of the weights: a hash of each tensor, and one checksum over all of them.

The checksum covers every byte of every tensor, their names, shapes and dtypes, and their order
(law 5 rests on it). The hash of a tensor is the sum over its 16-bit units, of any dtype (a bfloat16
is one, a float32 two), modulo 2**64, of

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

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from rhymeflow.core.types import Version
from rhymeflow.weights.manifest import Manifest

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 1 << 18
"""Bytes that are copied and hashed at a time: they stay in a core's second cache between."""

MASK = (1 << 64) - 1
"""Hashes are numbers modulo 2**64."""


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


class ChecksumMismatch(RuntimeError):  # noqa: N818 - it is what happened
    """The weights that arrived are not the weights that were published."""


class ProvedWeights(NamedTuple):
    """What a pull brought: proved weights of `version`."""

    version: Version
    checksum: int


def bytes_of(tensor: Tensor) -> np.ndarray:
    """Return the tensor's bytes in order, [num_bytes]: a view of CPU memory where that is one."""
    import torch  # is loaded where there is a tensor

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def as_text(checksum: int) -> str:
    """The checksum as logs have it: 16 hexadecimal digits, as SQL has no unsigned 64-bit number."""
    return f"{checksum:016x}"


def digest(data: np.ndarray, start: int = 0) -> int:
    """64-bit hash of these bytes, [n] uint8, which begin at byte `start` of their tensor.

    Digests of a tensor's shards, each with its start, add up modulo 2**64 to the digest of all.
    """
    from rhymeflow.weights.kernels import hash_units  # loads numba

    if start % 2:  # from the beginning of a unit on
        data, start = np.concatenate([np.zeros(1, np.uint8), data]), start - 1
    return int(hash_units(units_of(data), start // 2, INNER))


def copy_and_digest(target: np.ndarray, source: np.ndarray) -> int:
    """Copy bytes, [n] uint8; return the digest of what then stands in `target`."""
    total = 0
    for start in range(0, len(source), _CHUNK):
        part = target[start : start + _CHUNK]
        np.copyto(part, source[start : start + _CHUNK])
        total += digest(part, start)
    return total & MASK


def units_of(data: np.ndarray) -> np.ndarray:
    """The bytes as 16-bit units, [n / 2]: a view, but for an odd number, which a 0 is added to."""
    if len(data) % 2:
        data = np.concatenate([data, np.zeros(1, np.uint8)])
    units = data.view(np.uint16)
    return units if units.flags.aligned else units.copy()


def combine(manifest: Manifest, digests: Sequence[int]) -> int:
    """One checksum for all tensors: names, dtypes, shapes and each one's digest, in order."""
    chain = xxhash.xxh3_64()
    for spec, value in zip(manifest, digests, strict=True):
        chain.update(f"{spec.name} {spec.describe()} {value}\n".encode())
    return chain.intdigest()
