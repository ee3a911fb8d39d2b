"""Attention within each sequence of a packed row by PyTorch's FlexAttention, on GPUs.

The row is attended to as it lies: a token sees its own response and the prompt that this one
continues, up to its own place. So a prompt shared by a group is computed once here too, and blocks
of the mask that nothing sees are skipped. Rows are padded to whole blocks, which bounds how many
shapes are compiled. On CPUs FlexAttention has no backward pass; there only the result is compared
with the padded rectangles of `attention.py`.

Holds true: as `attention.PackedAttention`. Knows trees of one trunk and its branches, which is what
`packing` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

BLOCK = 128
"""Tokens of a block of the mask, FlexAttention's own choice."""


class FlexAttention:
    """Causal attention inside each of `sequences`, which are ascending places in a row of T tokens.

    Two sequences have their first tokens in common, up to where both branch off, or none.
    """

    def __init__(self, sequences: Sequence[np.ndarray], num_tokens: int, device: torch.device):
        self._num_tokens = num_tokens
        self._padding = -num_tokens % BLOCK
        length = num_tokens + self._padding
        part_T, trunk_T = (
            torch.from_numpy(np.pad(ids, (0, self._padding), constant_values=-1)).to(device)
            for ids in parts(sequences, num_tokens)
        )

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            part = part_T[key]
            return (key <= query) & ((part == part_T[query]) | (part == trunk_T[query]))

        self._mask = create_block_mask(
            sees, None, None, length, length, device=device, BLOCK_SIZE=BLOCK
        )
        self._attention = _compiled() if device.type == "cuda" else flex_attention

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scale: float
    ) -> Tensor:
        """See `models.attention.Attention`; returns [T, H, D]."""
        padded = (F.pad(x, (0, 0, 0, self._padding))[None] for x in (q_HTD, k_GTD, v_GTD))
        out_1HTD: Tensor = self._attention(
            *padded,
            block_mask=self._mask,
            scale=scale,
            enable_gqa=q_HTD.shape[0] != k_GTD.shape[0],
        )
        return out_1HTD[0, :, : self._num_tokens].transpose(0, 1)


def parts(sequences: Sequence[np.ndarray], num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """For each token the part it lies in (a trunk or a branch), and that of its trunk, int64 [T].

    A trunk is its own trunk.
    """
    first_T = np.full(num_tokens, -1)  # the first sequence that each token is in
    shared_T = np.zeros(num_tokens, dtype=bool)
    for number, places in enumerate(sequences):
        is_new = first_T[places] < 0
        shared_T[places[~is_new]] = True
        first_T[places[is_new]] = number
    assert (first_T >= 0).all(), "a token of the row is in no sequence"
    part_T = 2 * first_T + shared_T
    trunk_T = part_T.copy()
    for places in sequences:
        trunk_T[places] = part_T[places[0]]
        assert len(np.unique(part_T[places])) <= 2, "a sequence is more than a trunk and a branch"
    return part_T, trunk_T


@cache
def _compiled() -> Callable[..., Any]:
    """FlexAttention is fast only if it is compiled, once in a process for all shapes."""
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled


__all__ = ["FlexAttention", "parts"]
