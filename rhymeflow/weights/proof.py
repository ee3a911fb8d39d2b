"""Proof of a copy of the weights: a hash of each tensor, and one checksum over all of them.

The checksum covers every byte of every tensor, their names, shapes and dtypes, and their order
(law 5 rests on it). The hash of a tensor is the sum over its 16-bit units (a bfloat16 is one, a
float32 two), modulo 2**64, of

    outer(i // 1024) * INNER[i % 1024] * unit i

with fixed random odd numbers: multilinear hashing (Lemire and Kaser, "Strongly universal string
hashing is fast", arXiv 1202.4961) with keys that are products. A unit's term depends only on its
index and its bits, so hashes of parts add up to that of the whole, and a change of some units
updates the hash without the others.

A single changed unit is always detected, since keys are odd. Of other differences a share of about
2**-47 goes undetected, over random keys: units differ by less than 2**16, so powers of two take at
most 15 of the 64 bits. This guards against torn copies, stale tensors and bugs, not against an
attacker who knows the keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from rhymeflow.core.types import Version
from rhymeflow.weights.manifest import Manifest

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 1 << 18  # bytes that are copied, then hashed while they are in the L2 cache

MASK = (1 << 64) - 1  # hashes are numbers modulo 2**64


HASH_BLOCK = 1024  # units that share an outer key; the inner keys fit the L1 cache
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mixed(numbers: np.ndarray) -> np.ndarray:
    """Hash [n] uint64 to odd numbers (SplitMix64, Steele et al. 2014)."""
    z = (numbers + np.uint64(1)) * np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def outer(first: int, count: int) -> np.ndarray:
    """Return the keys of `count` blocks from `first`, [count] uint64."""
    return mixed(np.arange(first, first + count, dtype=np.uint64))


INNER = mixed(np.arange(HASH_BLOCK, dtype=np.uint64) + np.uint64(1 << 63))
"""Keys of the units of a block, [1024] uint64."""


class ChecksumMismatch(RuntimeError):  # noqa: N818 - it is what happened
    """The pulled weights are not the published ones."""


class ProvedWeights(NamedTuple):
    """The identity of weights that are proved by their checksum."""

    version: Version
    checksum: int


def bytes_of(tensor: Tensor) -> np.ndarray:
    """Return the tensor's bytes in order, [num_bytes]: a view if it is contiguous CPU memory."""
    import torch  # already loaded where there is a tensor

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def as_text(checksum: int) -> str:
    """Return 16 hexadecimal digits, for logs: SQL has no unsigned 64-bit integers."""
    return f"{checksum:016x}"


def digest(data: np.ndarray, start: int = 0) -> int:
    """Return the 64-bit hash of bytes, [n] uint8, that begin at byte `start` of their tensor.
    Digests of a tensor's shards add up, modulo 2**64, to the tensor's."""
    from rhymeflow.weights.kernels import hash_units  # loads numba

    if start % 2:  # begin at a whole unit
        data, start = np.concatenate([np.zeros(1, np.uint8), data]), start - 1
    return int(hash_units(units_of(data), start // 2, INNER))


def copy_and_digest(target: np.ndarray, source: np.ndarray, first: int = 0) -> int:
    """Copy bytes, [n] uint8; return the digest of `target`, whose tensor has `first` bytes before
    it, afterwards."""
    total = 0
    for start in range(0, len(source), _CHUNK):
        part = target[start : start + _CHUNK]
        np.copyto(part, source[start : start + _CHUNK])
        total += digest(part, first + start)
    return total & MASK


def units_of(data: np.ndarray) -> np.ndarray:
    """Return the bytes as 16-bit units, [n / 2], a view if possible; pad an odd number with a 0."""
    if len(data) % 2:
        data = np.concatenate([data, np.zeros(1, np.uint8)])
    units = data.view(np.uint16)
    return units if units.flags.aligned else units.copy()


def combine(manifest: Manifest, digests: Sequence[int]) -> int:
    """Return one checksum of all tensors' names, dtypes, shapes and digests, in order."""
    chain = xxhash.xxh3_64()
    for spec, value in zip(manifest, digests, strict=True):
        chain.update(f"{spec.name} {spec.describe()} {value}\n".encode())
    return chain.intdigest()
