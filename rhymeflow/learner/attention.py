"""Attention within each sequence of a packed row, as a `models.attention.Attention`.

`PackedAttention` gathers sequences of similar length into padded rectangles, runs causal SDPA and
scatters the results back. Padding comes after each sequence, so the causal mask hides it. The
gradient of a shared token is the sum over its sequences. `FlexAttention` is for GPUs.
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

SLACK = 0.125
"""Share by which a rectangle's sequences may be shorter than its longest one. Between 0.05 and 0.25
the time differs by less than its spread; one call per sequence takes twice as long."""

MIN_SLACK = 16
"""Tokens by which they may be shorter if that is more."""


class PackedAttention(Attention):
    """Causal attention inside each of `sequences`, given as indices into a row of T tokens."""

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

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scale: float
    ) -> Tensor:
        """See `models.attention.Attention`; returns [T, H, D]."""
        is_grouped = q_HTD.shape[0] != k_GTD.shape[0]
        blocks = zip(self._gather(q_HTD), self._gather(k_GTD), self._gather(v_GTD), strict=True)
        outputs_NHD = []
        for q_BHLD, k_BGLD, v_BGLD in blocks:
            out_BHLD = F.scaled_dot_product_attention(
                q_BHLD, k_BGLD, v_BGLD, is_causal=True, scale=scale, enable_gqa=is_grouped
            )
            outputs_NHD.append(out_BHLD.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs_NHD).index_select(0, self._source_T)

    def _gather(self, x_HTD: Tensor) -> list[Tensor]:
        x_NHD = x_HTD.transpose(0, 1).index_select(0, self._places_N)
        blocks = x_NHD.split([rows * length for rows, length in self._shapes])
        return [
            block.unflatten(0, shape).transpose(1, 2)
            for block, shape in zip(blocks, self._shapes, strict=True)
        ]


def _rectangles(
    sequences: Sequence[np.ndarray],
) -> tuple[list[np.ndarray], list[tuple[int, int]]]:
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


BLOCK = 128
"""Tokens per block of the mask, FlexAttention's default."""


class FlexAttention(Attention):
    """Causal attention inside each of `sequences`, given as indices into a row of T tokens.

    Two sequences may share only a prefix, so the row is a forest. It is attended to in place, with
    shared tokens computed once, and padded to whole blocks to bound the number of compiled shapes.
    On CPUs there is no backward pass.
    """

    def __init__(self, sequences: Sequence[np.ndarray], num_tokens: int, device: torch.device):
        self._num_tokens = num_tokens
        self._padding = -num_tokens % BLOCK
        length = num_tokens + self._padding
        # Each padding token attends to itself.
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
        self._attention: Any = _compiled() if device.type == "cuda" else flex_attention

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
    """Return when a depth-first walk of the tree enters each token, and when it has visited the
    token and all its descendants, int64 [T] each."""
    # Sorted by their indices, sequences with a common prefix are neighbours.
    sequences = sorted(sequences, key=lambda places: places.tolist())
    enter_T, leave_T = np.full((2, num_tokens), -1)
    count = 0
    for places, start in zip(sequences, branches(sequences, num_tokens), strict=True):
        enter_T[places[start:]] = np.arange(count, count + len(places) - start)
        count += len(places) - start
        leave_T[places] = count
    return enter_T, leave_T


def branches(sequences: Sequence[np.ndarray], num_tokens: int) -> list[int]:
    """Return where each sequence branches off: how many of its first tokens earlier ones have."""
    is_new_T, starts = np.ones(num_tokens, dtype=bool), []
    for places in sequences:
        starts.append(len(places) - int(is_new_T[places].sum()))
        assert is_new_T[places[starts[-1] :]].all(), "sequences share more than their beginnings"
        is_new_T[places] = False
    assert not is_new_T.any(), "a token of the row is in no sequence"
    return starts


@cache
def _compiled() -> Callable[..., Any]:
    """Compile FlexAttention, which is slow otherwise; once per process, for all shapes."""
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled
