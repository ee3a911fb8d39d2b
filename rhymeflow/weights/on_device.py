"""The loops of `kernels.py` for tensors that are not in one piece of the CPU's memory, in torch.

The hashes and bits are the same. int64 stands for uint64: sums and products wrap around alike.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from rhymeflow.weights import proof
from rhymeflow.weights.changes import Listed
from rhymeflow.weights.proof import HASH_BLOCK, INNER, MASK, outer

_AT_A_TIME = 1 << 24
"""Units that are hashed at a time: each takes 16 bytes meanwhile."""


def digest(tensor: Tensor) -> int:
    """`proof.digest` of a tensor's bytes, computed on its device."""
    if tensor.device.type == "cpu" or tensor.itemsize == 1:
        return proof.digest(proof.bytes_of(tensor))
    return digest_by_torch(tensor, _AT_A_TIME)


def digest_by_torch(tensor: Tensor, at_a_time: int) -> int:
    """`digest`, so many units at a time; of a dtype of at least two bytes."""
    units_U, total = _units(tensor.contiguous()), 0
    for start in range(0, len(units_U), at_a_time):
        part_U = units_U[start : start + at_a_time]
        index_U = torch.arange(start, start + len(part_U), device=tensor.device)
        total += int((_keys(index_U) * _unsigned(part_U)).sum())
    return total & MASK


def put_changes(tensor: Tensor, listed: Listed) -> int:
    """`kernels.put_changes` into a tensor wherever it is; return what that adds to its digest."""
    if not tensor.is_contiguous():
        dense = tensor.detach().contiguous()
        more = put_changes(dense, listed)
        tensor.detach().copy_(dense)
        return more
    blocks = np.arange(len(listed.counts), dtype=np.int64) * 65_536
    index = np.repeat(blocks, listed.counts) + listed.places
    index_N = torch.from_numpy(index).to(tensor.device)
    values_N = torch.from_numpy(listed.values.view(np.int16).copy()).to(tensor.device)
    units_U = _units(tensor)
    change_N = _unsigned(values_N) - _unsigned(units_U[index_N])
    units_U[index_N] = values_N
    return int((_keys(index_N) * change_N).sum()) & MASK


def _units(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.int16)


def _unsigned(units_N: Tensor) -> Tensor:
    return units_N.long() & 0xFFFF


def _keys(index_N: Tensor) -> Tensor:
    inner, outer_keys = _tables(str(index_N.device), int(index_N.max()) // HASH_BLOCK + 1)
    return inner[index_N % HASH_BLOCK] * outer_keys[index_N // HASH_BLOCK]


@lru_cache(4)
def _tables(device: str, num_blocks: int) -> tuple[Tensor, Tensor]:
    tables = INNER, outer(0, num_blocks)
    return tuple(torch.from_numpy(table.view(np.int64)).to(device) for table in tables)
