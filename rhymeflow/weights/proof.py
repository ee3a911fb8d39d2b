"""What proves a copy of the weights: a hash of each tensor, and one checksum over all of them.

The checksum covers every byte of every tensor, their names, shapes and dtypes, and their order
(law 5 rests on it). A tensor's hash is a sum over its bytes and their places (`keys.py` has the
formula): so hashes of its shards add up to its own, and a change of some bytes changes it by a
number that is known without the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from rhymeflow.core.types import Version
from rhymeflow.weights import keys
from rhymeflow.weights.manifest import Manifest, require

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 1 << 18
"""Bytes that are copied and hashed at a time: they stay in a core's second cache between."""

_SMALL = 1 << 20
"""Bytes of a tensor up to which it is hashed without compiled code, where there is none yet."""

MASK = (1 << 64) - 1
"""Hashes are numbers modulo 2**64."""


class ChecksumMismatch(RuntimeError):  # noqa: N818 - it is what happened
    """The weights that arrived are not the weights that were published."""


class Pulled(NamedTuple):
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
    return _hasher(len(data))(data, start)


def copy_and_digest(target: np.ndarray, source: np.ndarray) -> int:
    """Copy bytes, [n] uint8; return the digest of what then stands in `target`."""
    total, hasher = 0, _hasher(len(source))
    for start in range(0, len(source), _CHUNK):
        part = target[start : start + _CHUNK]
        np.copyto(part, source[start : start + _CHUNK])
        total += hasher(part, start)
    return total & MASK


def _hasher(num_bytes: int) -> Callable[[np.ndarray, int], int]:
    """How to hash a tensor of so many bytes: loading compiled code takes most of a second."""
    return by_kernel if num_bytes > _SMALL or "numba" in sys.modules else by_numpy


def by_kernel(data: np.ndarray, start: int) -> int:
    """`digest`, fast."""
    from rhymeflow.weights.kernels import hash_units

    data, start = _even(data, start)
    return int(hash_units(units_of(data), start // 2, keys.INNER))


def by_numpy(data: np.ndarray, start: int) -> int:
    """`digest`, slow, and with nothing to load."""
    data, start = _even(data, start)
    return keys.hash_units(units_of(data), start // 2)


def _even(data: np.ndarray, start: int) -> tuple[np.ndarray, int]:
    """The same bytes in the same places, from the beginning of a unit on."""
    return (
        (np.concatenate([np.zeros(1, np.uint8), data]), start - 1) if start % 2 else (data, start)
    )


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


def require_equal(
    manifest: Manifest, made: Pulled, published: Sequence[int], held: Mapping[str, int]
) -> None:
    """Compare the digest of each tensor that a puller has, by name, with what was `made`.

    Raises:
        ChecksumMismatch: they differ; `published` says in which tensors.
    """
    found = [held[spec.name] for spec in manifest]
    if combine(manifest, found) == made.checksum:
        return
    differing = [spec.name for spec, a, b in zip(manifest, published, found, strict=True) if a != b]
    raise ChecksumMismatch(
        f"pull of version {made.version}: the checksum is not the published one; "
        f"{len(differing)} of {len(found)} tensors differ, first "
        f"{differing[0] if differing else 'none: the published checksum itself is damaged'}"
    )


def checksum_of(manifest: Manifest, tensors: Mapping[str, Tensor]) -> int:
    """Checksum of these tensors as they are now."""
    require(manifest, tensors)
    return combine(manifest, [digest(bytes_of(tensors[spec.name])) for spec in manifest])
