"""What proves a copy of the weights: one checksum over all tensors.

Holds true: the checksum covers every byte of every tensor, their names, shapes and dtypes, and
their order (law 5 rests on it). Knows nothing of processes or memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from rhymeflow.weights.manifest import Manifest, require

if TYPE_CHECKING:
    from torch import Tensor


def bytes_of(tensor: Tensor) -> np.ndarray:
    """Return the tensor's bytes in order, [num_bytes]: a view of CPU memory where that is one."""
    import torch  # is loaded where there is a tensor

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def as_text(checksum: int) -> str:
    """The checksum as logs have it: 16 hexadecimal digits, as SQL has no unsigned 64-bit number."""
    return f"{checksum:016x}"


def digest(data: np.ndarray) -> int:
    """64-bit checksum of one tensor's bytes (xxHash XXH3)."""
    return xxhash.xxh3_64_intdigest(data.data)


def combine(manifest: Manifest, digests: Sequence[int]) -> int:
    """One checksum for all tensors: names, dtypes, shapes and each one's digest, in order."""
    chain = xxhash.xxh3_64()
    for spec, value in zip(manifest, digests, strict=True):
        chain.update(f"{spec.name} {spec.describe()} {value}\n".encode())
    return chain.intdigest()


def checksum_of(manifest: Manifest, tensors: Mapping[str, Tensor]) -> int:
    """Checksum of these tensors as they are now."""
    require(manifest, tensors)
    return combine(manifest, [digest(bytes_of(tensors[spec.name])) for spec in manifest])
