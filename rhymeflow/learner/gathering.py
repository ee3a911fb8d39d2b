"""Tensors whose rows are spread over ranks, made whole on rank 0, one block after the other.

No rank ever has more than its rows and one block, which only rank 0 has. On one rank the tensors
are those that there are, not copied where they have the dtype that is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rhymeflow.learner.ranks import Ranks
from rhymeflow.utils import progress


class Gathering(Mapping[str, Tensor]):
    """The tensors of `shapes` by name, in `dtype`, gathered when rank 0 looks them up.

    It does so in their order, while the others `give` their rows; or all ranks go through `blocks`.
    `rows` returns this rank's rows of a tensor, all on one device.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        blocks: Sequence[Sequence[str]],
        rows: Callable[[str], Tensor],
        dtype: torch.dtype,
        ranks: Ranks,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._shapes, self._names, self._rows = shapes, blocks, rows
        self.dtype, self._ranks, self._group = dtype, ranks, group
        self._left = self.blocks()
        self._block: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        while name in self._shapes and name not in self._block:
            self._block = {}  # before the next one is there
            block = next(self._left, None)
            assert block is not None, f"{name} was looked up after what follows it"
            self._block = block
        return self._block[name]

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def give(self) -> None:
        """For the other ranks: give rank 0 what it looks up."""
        for _ in self.blocks():
            pass

    def blocks(self) -> Iterator[dict[str, Tensor]]:
        """Every block; on ranks but 0 each is empty. All ranks have to go through all."""
        for names in self._names:
            progress.advance()
            if self._ranks.count == 1:
                yield {name: self._rows(name).to(self.dtype) for name in names}
            else:
                yield self._gather(names)

    def _gather(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Gather one block: all its rows in one message."""
        lengths = [self._padded_size(self._shapes[name]) for name in names]
        ends = np.cumsum(lengths)
        starts = ends - lengths
        count = self._ranks.count if self._ranks.is_lead else 1
        device = self._rows(names[0]).device
        parts_NS = torch.zeros((count, int(ends[-1])), dtype=self.dtype, device=device)
        for name, start in zip(names, starts, strict=True):
            rows = self._rows(name).reshape(-1)
            parts_NS[0, start : start + len(rows)] = rows
        # One by one, into their place: gloo's `gather` would make a copy of all.
        if not self._ranks.is_lead:
            dist.send(parts_NS[0], 0, group=self._group)
            return {}
        for rank in range(1, self._ranks.count):
            dist.recv(parts_NS[rank], rank, group=self._group)
        whole: dict[str, Tensor] = {}
        for name, start, end in zip(names, starts, ends, strict=True):
            shape = self._shapes[name]
            # Of a block of one tensor this is the tensor; else a copy.
            whole[name] = parts_NS[:, start:end].reshape(-1)[: math.prod(shape)].view(*shape)
        return whole

    def _padded_size(self, shape: Sequence[int]) -> int:
        """Numbers in the most rows of a rank. Only those after the last row of all are padding."""
        return -(-shape[0] // self._ranks.count) * math.prod(shape[1:])
