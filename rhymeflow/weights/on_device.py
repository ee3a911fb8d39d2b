"""Weights on the device where they are: hashed and changed there, copied through pinned memory.

Results are those of `kernels.py` to the bit: sums and products of int64 wrap around as those of
uint64. Nothing waits for a GPU but what returns numbers or bytes. On CPUs memory is plain memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from rhymeflow.weights.changes import BLOCK, Listed
from rhymeflow.weights.manifest import Slab
from rhymeflow.weights.proof import HASH_BLOCK, INNER, MASK, bytes_of, digest, outer

Hash = int | Tensor  # a digest, or an int64 scalar on a device that is one modulo 2**64

HASHED_AT_A_TIME = 1 << 22
"""Units that are hashed at a time; each takes 8 bytes of working memory, in strided runs 50."""

STAGED_BYTES = 1 << 25  # size of a buffer between a device and the host's memory

_LIMB = 16
"""Bits of a key that are multiplied at a time: sums of 1,024 products are exact in float64."""


def is_on_host(tensor: Tensor) -> bool:
    """Return whether compiled code can read the tensor's memory."""
    return tensor.device.type == "cpu"


def as_ints(hashes: Sequence[Hash]) -> list[int]:
    """Return the digests; waits for the device once."""
    waiting = [each for each in hashes if isinstance(each, Tensor)]
    found = iter(torch.stack(waiting).tolist() if waiting else ())
    return [(next(found) if isinstance(each, Tensor) else each) & MASK for each in hashes]


def hash_of(tensor: Tensor, slab: Slab) -> Hash:
    """Return what these numbers, the slab of a tensor, add to the tensor's digest."""
    if is_on_host(tensor) and slab.runs == 1:
        return digest(bytes_of(tensor), slab.start)
    assert tensor.itemsize > 1, "numbers of one byte are hashed on CPUs alone"
    rows = tensor.detach().reshape(slab.runs, tensor.numel() // slab.runs)
    if rows.stride(1) != 1:  # `contiguous` would leave a single column as it is
        rows = rows.clone(memory_format=torch.contiguous_format)
    units_RL = rows.view(torch.int16)
    start, length = slab.start // 2, units_RL.shape[1]
    if slab.runs > 1:
        return _hash(units_RL, start, slab.stride // 2)
    # One run: its whole blocks, and what is before the first and after the last.
    head = min(-start % HASH_BLOCK, length)
    tail = head + (length - head) // HASH_BLOCK * HASH_BLOCK
    total = _hash_blocks(units_RL[0, head:tail].view(-1, HASH_BLOCK), (start + head) // HASH_BLOCK)
    for first, end in ((0, head), (tail, length)):
        if first < end:
            total = total + _hash(units_RL[:, first:end], start + first, 1)
    return total


def _hash_blocks(units_BK: Tensor, first_block: int) -> Tensor:
    """Hash whole blocks, by a product that reads them once."""
    device = units_BK.device
    num_blocks, total = len(units_BK), torch.zeros((), dtype=torch.int64, device=device)
    _, limbs, values, keys = _keys(str(device), (first_block + num_blocks).bit_length())
    for start in range(0, num_blocks, HASHED_AT_A_TIME // HASH_BLOCK):
        part_BK = units_BK[start : start + HASHED_AT_A_TIME // HASH_BLOCK].view(torch.uint16)
        limbs_BP = (part_BK.to(torch.float64) @ limbs).long()
        keys_B = keys[first_block + start :][: len(part_BK)]
        total += ((limbs_BP * values).sum(1) * keys_B).sum()
    return total


def _hash(units_RL: Tensor, start: int, stride: int) -> Tensor:
    """Hash runs of units, the first from unit `start` of their tensor on, `stride` units apart."""
    (num_runs, length), device = units_RL.shape, units_RL.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    column_L, at_a_time = torch.arange(length, device=device), max(1, HASHED_AT_A_TIME // length)
    for first in range(0, num_runs, at_a_time):
        part_RL = units_RL[first : first + at_a_time]
        first_R = start + stride * torch.arange(first, first + len(part_RL), device=device)
        index_RL, end = first_R[:, None] + column_L, start + stride * (num_runs - 1) + length
        total += _terms(index_RL, _unsigned(part_RL), end).sum()
    return total


def _terms(index: Tensor, units: Tensor, end: int) -> Tensor:
    """Return what each of these units, whose indices are below `end`, adds to its tensor's hash."""
    inner, _, _, blocks = _keys(str(index.device), (end // HASH_BLOCK).bit_length())
    return inner[index % HASH_BLOCK] * blocks[index // HASH_BLOCK] * units


@lru_cache(64)
def _keys(device: str, num_bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the keys of a block's units, [1024]; the parts of these, [1024, 4] float64, and the
    value of each part, [4]; and the keys of blocks whose index has at most `num_bits` bits."""
    shifts = np.arange(0, 64, _LIMB, dtype=np.uint64)
    limbs = ((INNER[:, None] >> shifts) & np.uint64((1 << _LIMB) - 1)).astype(np.float64)
    numbers = (
        each.view(np.int64) for each in (INNER, np.uint64(1) << shifts, outer(0, 1 << num_bits))
    )
    units, values, blocks = (torch.from_numpy(each).to(device) for each in numbers)
    return units, torch.from_numpy(limbs).to(device), values, blocks


def put_on_device(rows: Tensor, slab: Slab, listed: Listed, first: int, staging: Staging) -> Tensor:
    """Apply changes of the slab, of a part that begins at byte `first` of the tensor, to its
    numbers, `rows`, [runs, numbers]; return what that adds to the digest."""
    units_RL, device = rows.view(torch.int16), rows.device
    counts, places, values = (staging.brought(each) for each in listed)
    starts = torch.arange(len(listed.counts), device=device) * BLOCK
    counts_B = counts.view(torch.int32).long()
    index_N = torch.repeat_interleave(starts, counts_B, output_size=len(listed.places))
    index_N += _unsigned(places.view(torch.int16)) + first // 2
    values_N = values.view(torch.int16)
    at_N, stride = index_N - slab.start // 2, slab.stride // 2 or max(1, units_RL.shape[1])
    run_N, column_N = at_N // stride, at_N % stride
    change_N = _unsigned(values_N) - _unsigned(units_RL[run_N, column_N])
    units_RL[run_N, column_N] = values_N
    return _terms(index_N, change_N, first // 2 + BLOCK * len(listed.counts)).sum()


def _unsigned(units_N: Tensor) -> Tensor:
    return units_N.long() & 0xFFFF


Piece = tuple[Tensor, "torch.cuda.Event | None"]


class Staging:
    """Two buffers of host memory, pinned if the device is a GPU: while the bytes of one of them go
    to the device, by its current stream, the host fills the other."""

    def __init__(self, device: torch.device, size: int = STAGED_BYTES) -> None:
        self.device, is_gpu = device, device.type == "cuda"
        self._buffers = deque[Piece](
            (
                torch.empty(size, dtype=torch.uint8, pin_memory=is_gpu),
                torch.cuda.Event() if is_gpu else None,
            )
            for _ in range(2)
        )
        """Each with the event of its last copy, the longest ago first."""
        self._size = size

    def brought(self, data: np.ndarray) -> Tensor:
        """Return a copy of an array's bytes on the device, [n] uint8."""
        source = data.reshape(-1).view(np.uint8)
        into = torch.empty(len(source), dtype=torch.uint8, device=self.device)
        self.copy_in(into[None], source[None])
        return into

    def copy_in(self, into_RN: Tensor, source_RN: np.ndarray) -> None:
        """Copy bytes to the device, where later work of the current stream finds them."""
        for rows, columns in _tiles(len(source_RN), source_RN.shape[1], self._size):
            part_RN, target_RN = source_RN[rows, columns], into_RN[rows, columns]
            buffer, copied = self._buffers[0]
            if copied is not None:
                copied.synchronize()
            staged_RN = buffer[: part_RN.size].view(part_RN.shape)
            np.copyto(staged_RN.numpy(), part_RN)
            if not target_RN.is_contiguous():  # the device puts the rows in their places
                staged_RN = staged_RN.to(self.device, non_blocking=True)
            target_RN.copy_(staged_RN, non_blocking=True)
            if copied is not None:
                copied.record(torch.cuda.current_stream(self.device))
            self._buffers.rotate(1)


class Outbox:
    """Host memory, pinned if the device is a GPU, for all that a process publishes. A stream of its
    own fills it while the device goes on; then the host takes the bytes, in the same order."""

    def __init__(self, device: torch.device, num_bytes: int, size: int = STAGED_BYTES) -> None:
        """`size` is that of each piece of the memory."""
        is_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if is_gpu else None
        self.device, self._size, self._at = device, size, 0
        self._pieces = [
            (
                torch.empty(min(size, num_bytes - first), dtype=torch.uint8, pin_memory=is_gpu),
                torch.cuda.Event() if is_gpu else None,
            )
            for first in range(0, num_bytes, size)
        ]
        """Each with the event of its last copy."""

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Have the stream do what the device is told in the block, after what it has been told so
        far; there `put` fills the memory, and `take`, afterwards, empties it."""
        self._at = 0
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield
        self._at = 0

    def put(self, tensor: Tensor) -> None:
        """Have the bytes of a contiguous tensor copied, and wait for nothing."""
        source_N = tensor.detach().reshape(-1).view(torch.uint8)
        for (buffer, copied), there, here in self._parts(len(source_N)):
            buffer[there].copy_(source_N[here], non_blocking=True)
            if copied is not None:
                copied.record(self.stream)

    def take(self, into: np.ndarray) -> None:
        """Fill [n] uint8, once the bytes are there."""
        for (buffer, copied), there, here in self._parts(len(into)):
            if copied is not None:
                copied.synchronize()
            np.copyto(into[here], buffer[there].numpy())

    def _parts(self, count: int) -> Iterator[tuple[Piece, slice, slice]]:
        """Yield the pieces that the next bytes are in, and where in these and among the bytes."""
        first = 0
        while first < count:
            number, start = divmod(self._at, self._size)
            length = min(self._size - start, count - first)
            yield self._pieces[number], slice(start, start + length), slice(first, first + length)
            first, self._at = first + length, self._at + length


def _tiles(num_rows: int, length: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Cut [rows, length] into parts of at most `size`: of some whole rows, or of one row."""
    at_a_time = max(1, size // max(1, length))
    for row in range(0, num_rows, at_a_time):
        for column in range(0, length, size):
            yield slice(row, row + at_a_time), slice(column, column + size)
