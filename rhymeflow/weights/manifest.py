"""The manifest: the tensors of a version of the weights, and the place of each among its bytes.

It is a pure function of names, shapes and dtypes in their order, so two processes with equal
manifests read the same bytes as the same tensors. Imports no torch: messages carry manifests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Slices start at cache lines, which also satisfies every dtype's alignment.
_ALIGNMENT = 64


class ManifestMismatch(RuntimeError):  # noqa: N818 - it is what happened
    """Tensors are not those of the manifest; the message names the first difference."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its dtype by torch's name (`bfloat16`), and its offset in a copy's bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    num_bytes: int

    def describe(self) -> str:
        """Return dtype and shape for messages, as `bfloat16[49152, 576]`."""
        return _describe(self.dtype, self.shape)


Manifest = tuple[TensorSpec, ...]


class Slab(NamedTuple):
    """Bytes of a tensor that a process has: `runs` of `length`, the first at byte `start`, each
    `stride` bytes after the one before. Rows are one run, columns are one in each row."""

    start: int
    length: int
    runs: int = 1
    stride: int = 0

    def within(self, first: int, end: int) -> tuple[Slab, slice, slice]:
        """Return what the bytes from `first` to `end`, whole rows, have of it, counted from
        `first`, and its runs and their bytes that these are."""
        if self.runs == 1:
            low = min(max(self.start, first), end)
            high = max(min(self.start + self.length, end), low)
            part = Slab(low - first, high - low)
            return part, slice(0, 1), slice(low - self.start, high - self.start)
        low = min(self.runs, max(0, -(-(first - self.start) // self.stride)))
        high = min(self.runs, max(low, (end - self.start - self.length) // self.stride + 1))
        part = Slab(self.start + low * self.stride - first, self.length, high - low, self.stride)
        return part, slice(low, high), slice(0, self.length)

    def of(self, data: np.ndarray) -> np.ndarray:
        """Return its bytes, [runs, length], of those of the tensor."""
        shape, strides = (self.runs, self.length), (self.stride, 1)
        return np.lib.stride_tricks.as_strided(data[self.start :], shape, strides)


def slab_of(spec: TensorSpec, axis: int, first: int, size: int) -> Slab:
    """Return the place of a part of a tensor, of which one dimension is cut."""
    if size == spec.shape[axis] or not spec.num_bytes:
        return Slab(0, spec.num_bytes)
    runs = math.prod(spec.shape[:axis])
    stride = spec.num_bytes // runs
    unit = stride // spec.shape[axis]
    return Slab(first * unit, size * unit, runs, stride if runs > 1 else 0)


def plan(tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> Manifest:
    """Return the manifest for {name: (shape, dtype)} in the mapping's order."""
    specs, offset = [], 0
    for name, (shape, dtype) in tensors.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        specs.append(TensorSpec(name, tuple(shape), _dtype_name(dtype), offset, num_bytes))
        offset += _aligned(num_bytes)
    return tuple(specs)


def manifest_of(tensors: Mapping[str, Tensor]) -> Manifest:
    """Return the manifest for these tensors; tied parameters must be given once."""
    starts = sorted((t.data_ptr(), n) for n, t in tensors.items() if t.numel() and not t.is_meta)
    for (a, first), (b, second) in pairwise(starts):
        assert a != b, f"{first} and {second} are one tensor: give tied parameters once"
    return plan({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})


def slot_bytes(manifest: Manifest) -> int:
    """Return the bytes that one copy of all tensors takes."""
    return manifest[-1].offset + _aligned(manifest[-1].num_bytes) if manifest else 0


def require(manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Raise `ManifestMismatch` unless `tensors` have the manifest's names, shapes and dtypes."""
    require_names(manifest, tensors)
    for spec in manifest:
        require_spec(spec, tensors[spec.name])


def require_names(manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Raise `ManifestMismatch` unless `tensors` have the manifest's names; look up no tensor."""
    names = {spec.name for spec in manifest}
    for name in tensors:
        if name not in names:
            raise ManifestMismatch(f"{name} is not in the weight store's manifest")
    for spec in manifest:
        if spec.name not in tensors:
            raise ManifestMismatch(f"{spec.name} is in the weight store's manifest, but not given")


def require_spec(spec: TensorSpec, tensor: Tensor) -> None:
    """Raise `ManifestMismatch` unless the tensor has this shape and dtype."""
    actual = _describe(_dtype_name(tensor.dtype), tuple(tensor.shape))
    if actual != spec.describe():
        raise ManifestMismatch(f"{spec.name} is {actual}, in the manifest {spec.describe()}")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _describe(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
