"""Tensors of awkward bits, and how they change."""

import numpy as np
import torch

from rhymeflow.weights import proof
from rhymeflow.weights.install import Installation
from rhymeflow.weights.manifest import manifest_of

PATTERNS = (0x0000, 0x8000, 0x7FC0, 0x7FC1, 0xFFFF, 0x7F80, 0x3F80, 0x3F81)
"""bfloat16: 0, -0, two NaNs, a NaN of all ones, infinity, 1 and the next number."""


def random_bits(shape, dtype, rng):
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    raw = torch.from_numpy(rng.integers(0, 256, num_bytes, dtype=np.uint8))
    return raw.view(dtype).reshape(shape) if num_bytes else torch.empty(shape, dtype=dtype)


def checksum_of(tensors):
    digests = [proof.digest(proof.bytes_of(tensor)) for tensor in tensors.values()]
    return proof.combine(manifest_of(tensors), digests)


def install(reader, into, want=None):
    return Installation(into).pull(reader, want)


def bits(tensors):
    return {name: proof.bytes_of(tensor).tobytes() for name, tensor in tensors.items()}


def changed(tensor, share, rng):
    """A copy in which about this share of the 16-bit units was set to awkward bits."""
    data = proof.bytes_of(tensor).copy()
    units = data[: len(data) // 2 * 2].view(np.uint16)
    chosen = rng.random(len(units)) < share
    units[chosen] = rng.choice(np.array(PATTERNS, np.uint16), chosen.sum())
    if not len(data):
        return tensor.clone()
    return torch.from_numpy(data).view(tensor.dtype).reshape(tensor.shape)


def weights(value, size=200_000):
    """Tensors of which few units depend on `value`."""
    torch.manual_seed(0)
    tensors = {
        "embed.weight": torch.randn(size // 100, 100).bfloat16(),
        "layer.weight": torch.randn(300, 7),
        "norm": torch.ones(33).bfloat16(),
    }
    tensors["embed.weight"][value % 7, : 3 * value] = float(value)
    return tensors
