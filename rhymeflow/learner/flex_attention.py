"""Attention within each sequence of a packed row by PyTorch's FlexAttention, on GPUs.

The row is attended to as it lies, so what sequences share is computed once here too; blocks of the
mask that nothing sees are skipped. Rows are padded to whole blocks, which bounds how many shapes
are compiled. On CPUs FlexAttention has no backward pass.
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

from rhymeflow.models.attention import Attention

BLOCK = 128
"""Tokens of a block of the mask, FlexAttention's own choice."""


class FlexAttention(Attention):
    """Causal attention inside each of `sequences`, which are places in a row of T tokens.

    Two sequences have their first tokens in common, up to where both branch off, or none.
    """

    def __init__(self, sequences: Sequence[np.ndarray], num_tokens: int, device: torch.device):
        self._num_tokens = num_tokens
        self._padding = -num_tokens % BLOCK
        length = num_tokens + self._padding
        # What pads the row sees itself.
        padding = np.arange(num_tokens, length)
        enter_T, leave_T = (
            torch.from_numpy(np.r_[number_T, padding + i]).to(device)
            for i, number_T in enumerate(visits(sequences, num_tokens))
        )

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (enter_T[key] <= enter_T[query]) & (enter_T[query] < leave_T[key])

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


def visits(sequences: Sequence[np.ndarray], num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """When a walk through the tree, depth first, enters each token and leaves it, int64 [T].

    It is at a token's descendants, and at the token, from when it enters it to before it leaves it.
    """
    enter_T, leave_T = np.full((2, num_tokens), -1)
    count = 0
    # In the order of their places, those that begin alike are neighbours.
    for places in sorted(sequences, key=lambda places: places.tolist()):
        is_new = enter_T[places] < 0
        start = len(places) - int(is_new.sum())
        assert is_new[start:].all(), "sequences share more than their beginnings"
        enter_T[places[start:]] = np.arange(count, count + len(places) - start)
        count += len(places) - start
        leave_T[places] = count
    assert count == num_tokens, "a token of the row is in no sequence"
    return enter_T, leave_T


@cache
def _compiled() -> Callable[..., Any]:
    """FlexAttention is fast only if it is compiled, once in a process for all shapes."""
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled
