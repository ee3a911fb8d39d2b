"""Sequences of a packed row as padded rectangles, and back.

Padding comes after each sequence, so nothing causal sees it. A token that several sequences share
is in each of them: its first copy's result is used, and the gradients of all copies are added up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

SLACK = 0.125
"""Share by which a rectangle's sequences may be shorter than its longest one. Between 0.05 and 0.25
the time differs by less than its spread; one call per sequence takes twice as long."""

MIN_SLACK = 16  # tokens by which they may be shorter if that is more


class Rectangles:
    """The `sequences`, given as indices into a row of T tokens, in rectangles of similar length."""

    def __init__(self, sequences: Sequence[np.ndarray], num_tokens: int, device: torch.device):
        places, self._shapes = _rectangles(sequences)
        source_T = np.full(num_tokens, -1)
        flat = np.concatenate([block.ravel() for block in places])
        # All copies of a shared token have the same output; the first is used.
        real = np.flatnonzero(flat >= 0)[::-1]
        source_T[flat[real]] = real
        assert (source_T >= 0).all(), "a token of the row is in no sequence"
        self._places_N = torch.from_numpy(np.maximum(flat, 0)).to(device)
        self._source_T = torch.from_numpy(source_T).to(device)

    def gather(self, x_TE: Tensor) -> list[Tensor]:
        """Return [B, L, ...] for each rectangle, from [T, ...]; padding repeats the first token."""
        x_NE = x_TE.index_select(0, self._places_N)
        blocks = x_NE.split([rows * length for rows, length in self._shapes])
        pairs = zip(blocks, self._shapes, strict=True)
        return [block.unflatten(0, shape) for block, shape in pairs]

    def scatter(self, blocks_BLE: Sequence[Tensor]) -> Tensor:
        """Return [T, ...] from what was computed for each rectangle, [B, L, ...]."""
        x_NE = torch.cat([block.flatten(0, 1) for block in blocks_BLE])
        return x_NE.index_select(0, self._source_T)


def _rectangles(sequences: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[tuple[int, int]]]:
    """Return padded rectangles of row indices [B, L], -1 for padding, longest first."""
    longest_first = sorted(sequences, key=len, reverse=True)
    places, shapes = [], []
    start = 0
    while start < len(longest_first):
        length = len(longest_first[start])
        shortest = length - max(MIN_SLACK, int(SLACK * length))
        stop = start
        while stop < len(longest_first) and len(longest_first[stop]) >= shortest:
            stop += 1
        block = np.full((stop - start, length), -1)
        for row, sequence in zip(block, longest_first[start:stop], strict=True):
            row[: len(sequence)] = sequence
        places.append(block)
        shapes.append((stop - start, length))
        start = stop
    return places, shapes
