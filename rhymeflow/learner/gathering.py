"""Sharded tensors made whole on rank 0, one block (a layer) after the other.

Holds true: no rank ever has more than its shards and one block; rank 0 alone has that. A whole
tensor is its shards' rows in the ranks' order, bit for bit. Knows nothing of what the tensors are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rhymeflow.learner.ranks import Ranks
from rhymeflow.utils import progress

_END = -1


class Gathering:
    """Gathers blocks of tensors; `shapes` are of whole tensors, in order.

    `shard` returns this rank's rows of a tensor, all on one device; they are rounded to `dtype`.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        blocks: Sequence[Sequence[str]],
        shard: Callable[[str], Tensor],
        dtype: torch.dtype,
        ranks: Ranks,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.shapes, self._blocks = shapes, blocks
        self._shard, self._dtype = shard, dtype
        self._ranks, self._group = ranks, group

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Every block; on ranks but 0 each is empty. All ranks have to go through all."""
        for names in self._blocks:
            yield self._gather(names)

    @contextmanager
    def on_demand(self) -> Iterator[GatheredTensors]:
        """For rank 0: all tensors, each gathered when it is looked up; the others `serve`."""
        tensors = GatheredTensors(self)
        yield tensors
        self._ask(_END)

    def serve(self) -> None:
        """For the other ranks: give rank 0 the blocks that it asks for, until it has had enough."""
        while (number := self._ask()) != _END:
            self._gather(self._blocks[number])

    def block_with(self, name: str) -> dict[str, Tensor]:
        """For rank 0: the block that this tensor is in."""
        number = next(i for i, names in enumerate(self._blocks) if name in names)
        self._ask(number)
        return self._gather(self._blocks[number])

    def _ask(self, number: int = _END) -> int:
        """What rank 0 says, on every rank."""
        said = torch.tensor([number])
        dist.broadcast(said, 0, group=self._group)
        return int(said)

    def _gather(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Gather one block: all its shards in one message."""
        progress.advance()
        lengths = [self._padded_size(self.shapes[name]) for name in names]
        ends = np.cumsum(lengths)
        starts = ends - lengths
        count = self._ranks.count if self._ranks.is_lead else 1
        device = self._shard(names[0]).device
        parts_NS = torch.zeros((count, int(ends[-1])), dtype=self._dtype, device=device)
        for name, start in zip(names, starts, strict=True):
            shard = self._shard(name).reshape(-1)
            parts_NS[0, start : start + len(shard)] = shard
        # One by one, into their place: gloo's `gather` would make a copy of all.
        if not self._ranks.is_lead:
            dist.send(parts_NS[0], 0, group=self._group)
            return {}
        for rank in range(1, self._ranks.count):
            dist.recv(parts_NS[rank], rank, group=self._group)
        whole: dict[str, Tensor] = {}
        for name, start, end in zip(names, starts, ends, strict=True):
            shape = self.shapes[name]
            # Of a block of one tensor this is the tensor; else a copy.
            whole[name] = parts_NS[:, start:end].reshape(-1)[: math.prod(shape)].view(shape)
        return whole

    def _padded_size(self, shape: tuple[int, ...]) -> int:
        """Numbers in the greatest shard. Only those after the last row of all are padding."""
        return -(-shape[0] // self._ranks.count) * math.prod(shape[1:])


class GatheredTensors(Mapping[str, Tensor]):
    """All tensors by name, of which the block looked at last is there."""

    def __init__(self, gathering: Gathering) -> None:
        self._gathering = gathering
        self._block: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._gathering.shapes:
            raise KeyError(name)
        if name not in self._block:
            self._block = {}  # before the next one is there
            self._block = self._gathering.block_with(name)
        return self._block[name]

    def __contains__(self, name: object) -> bool:
        return name in self._gathering.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._gathering.shapes)

    def __len__(self) -> int:
        return len(self._gathering.shapes)


__all__ = ["GatheredTensors", "Gathering"]
