"""Attention of one engine iteration: write new keys and values, attend through the cache.

On CPUs a compiled kernel does it (`cpu_attention.py`). Elsewhere, and in float64, it is done here
by torch's: sequences that run few tokens are attended to together (`_Block`), any other by itself
(`_Chunk`). A block's rows of all query heads that share a key-value head are one matrix,
[slots * G, W * H / G, D] against [slots * G, L, D]: keys and values are read once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rhymeflow.cpu import choice
from rhymeflow.engine.native.cache import Span
from rhymeflow.engine.native.cpu_attention import CpuAttention
from rhymeflow.models.attention import Attention

WIDEST = 33
"""Most new tokens of a sequence in a block, which all its slots get as many rows as."""

PAD = 32
"""Lengths of blocks are rounded up to this, a divisor of every size class's capacity: CUDA's
kernels want masks whose rows are aligned."""


class Attending(Attention, Protocol):
    """The attention of one iteration over spans."""

    order: Iterable[int]
    """The spans' places in their list, in the order in which the packed row has them."""


def attention_for(
    device: torch.device, dtype: torch.dtype, head_dim: int
) -> Callable[[list[Span]], Attending]:
    """What makes the attention of each iteration: the compiled one where it can, on CPUs."""
    if choice.has_attention(device, dtype, head_dim):
        return CpuAttention(dtype, head_dim).over
    return partial(CachedAttention, device=device)


class CachedAttention(Attending):
    """The `models.attention.Attention` of one iteration, in a few large products.

    What the row holds beyond the spans gets zeros. Slots must not move while it is in use.
    """

    def __init__(self, spans: list[Span], device: torch.device) -> None:
        self.holds = spans[0].slot.size_class.shape
        chunks = [[i] for i, span in enumerate(spans) if span.num_new > WIDEST]
        blocks: dict[int, list[int]] = {}
        for i, span in enumerate(spans):
            if span.num_new <= WIDEST:
                blocks.setdefault(span.slot.size_class.capacity, []).append(i)
        self.order = [i for members in (*blocks.values(), *chunks) for i in members]
        self._parts: list[_Block | _Chunk] = []
        self._end = 0
        for members in blocks.values():
            self._add(_Block([spans[i] for i in members], self._end, device))
        for (i,) in chunks:
            self._add(_Chunk(spans[i], self._end, device))

    def _add(self, part: _Block | _Chunk) -> None:
        self._parts.append(part)
        self._end = part.rows.stop

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scale: float
    ) -> Tensor:
        """See `models.attention.Attention`; returns [T, H, D]."""
        heads, tokens, dim = q_HTD.shape
        q_THD, k_TGD, v_TGD = q_HTD.transpose(0, 1), k_GTD.transpose(0, 1), v_GTD.transpose(0, 1)
        out_THD = q_HTD.new_empty(tokens, heads, dim)
        if self._end < tokens:
            out_THD[self._end :] = 0
        for part in self._parts:
            rows = part.rows
            part.attend(layer, q_THD[rows], k_TGD[rows], v_TGD[rows], scale, out_THD[rows])
        return out_THD


class _Block:
    """A few new tokens for each of some sequences in one size class: as many rows for each slot
    from the first one's to the last one's, and for those between them that are of others."""

    def __init__(self, spans: list[Span], start: int, device: torch.device) -> None:
        slot_S = np.array([span.slot.index for span in spans])
        cached_S = np.array([span.cached for span in spans])
        size_S = np.array([span.num_new for span in spans])
        # Where each row of the block's part of the packed row belongs: sequence, place in it.
        span_T = np.repeat(np.arange(len(spans)), size_S)
        place_T = np.arange(len(span_T)) - np.repeat(np.cumsum(size_S) - size_S, size_S)
        self.rows = slice(start, start + len(span_T))
        first, self._width = slot_S.min(), int(size_S.max())
        block_S = slot_S - first
        padded_T = block_S[span_T] * self._width + place_T
        row_P = np.zeros((block_S.max() + 1) * self._width, dtype=np.int64)
        row_P[padded_T] = np.arange(len(span_T))
        self._padded_T = torch.from_numpy(padded_T).to(device)
        self._row_P = torch.from_numpy(row_P).to(device)
        size_class = spans[0].slot.size_class
        longest = -(-int((cached_S + size_S).max()) // PAD) * PAD
        self._kv = size_class.kv[:, :, first : slot_S.max() + 1, :, :longest]
        self._flat_keys, self._flat_values = size_class.flat_keys, size_class.flat_values
        kv_heads = size_class.shape.kv_heads
        group_TG = slot_S[span_T, None] * kv_heads + np.arange(kv_heads)
        new_TG = group_TG * size_class.capacity + (cached_S[span_T] + place_T)[:, None]
        self._new_TG = torch.from_numpy(new_TG.ravel()).to(device)
        upto_BW = np.arange(self._width) + np.zeros((block_S.max() + 1, 1), dtype=np.int64)
        upto_BW[block_S] += cached_S[:, None]
        self._seen_BWL = torch.arange(longest) <= torch.from_numpy(upto_BW)[..., None]
        for span, block in zip(spans, block_S, strict=True):
            if span.parents:
                seen_TL = self._seen_BWL[block, : span.num_new, : span.cached + span.num_new]
                _hide_strangers(seen_TL, span.parents)
        self._mask: Tensor | None = None

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float, out_THD: Tensor
    ) -> None:
        """Write the new keys and values, then fill `out_THD`."""
        _, heads, dim = q_THD.shape
        self._flat_keys[layer].index_copy_(0, self._new_TG, k_TGD.reshape(-1, dim))
        self._flat_values[layer].index_copy_(0, self._new_TG, v_TGD.reshape(-1, dim))
        keys, values = self._kv[layer]
        num, kv_heads = keys.shape[:2]
        group = heads // kv_heads
        if self._mask is None:  # what is added to scores, [slots, 1, W * H / G, L]
            seen_BRL = self._seen_BWL.repeat_interleave(group, 1)
            self._mask = torch.where(seen_BRL, 0.0, -torch.inf)[:, None].to(q_THD)
        q_SWGHD = q_THD.index_select(0, self._row_P).view(num, -1, kv_heads, group, dim)
        q_SGRD = q_SWGHD.transpose(1, 2).reshape(num, kv_heads, -1, dim)
        out_SGRD = F.scaled_dot_product_attention(
            q_SGRD, keys, values, attn_mask=self._mask, scale=scale
        )
        out_SWGHD = out_SGRD.view(num, kv_heads, -1, group, dim).transpose(1, 2)
        torch.index_select(out_SWGHD.reshape(-1, heads, dim), 0, self._padded_T, out=out_THD)


def _hide_strangers(seen_TL: Tensor, parents: list[int]) -> None:
    """The last tokens are a tree: each sees, of the tree, its ancestors and itself only."""
    size = len(parents)
    seen = [[bits >> i & 1 for i in range(size)] for bits in ancestors_of(parents)]
    seen_TL[-size:, -size:] = torch.tensor(seen, dtype=torch.bool)


def ancestors_of(parents: list[int]) -> list[int]:
    """For each node the set of its ancestors and itself, as bits."""
    bits: list[int] = []
    for node, parent in enumerate(parents):
        bits.append(1 << node | (bits[parent] if parent >= 0 else 0))
    return bits


class _Chunk:
    """Any number of new tokens of one sequence, a tree perhaps at their end."""

    def __init__(self, span: Span, start: int, device: torch.device) -> None:
        self.rows = slice(start, start + span.num_new)
        self._span = span
        self._kv = span.slot.size_class.kv[:, :, span.slot.index]
        self._seen_TL: Tensor | None = None
        if span.cached or span.parents:
            total = span.cached + span.num_new
            own_T = torch.arange(span.cached, total, device=device)
            self._seen_TL = torch.arange(total, device=device) <= own_T[:, None]
        if span.parents:
            assert self._seen_TL is not None
            _hide_strangers(self._seen_TL, span.parents)

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float, out_THD: Tensor
    ) -> None:
        """Write the new keys and values, then fill `out_THD`."""
        total = self._span.cached + self._span.num_new
        kv_2GLD = self._kv[layer, :, :, :total]
        kv_2GLD[0, :, self._span.cached :] = k_TGD.transpose(0, 1)
        kv_2GLD[1, :, self._span.cached :] = v_TGD.transpose(0, 1)
        out_1HTD = F.scaled_dot_product_attention(
            q_THD.transpose(0, 1)[None],
            kv_2GLD[0][None],
            kv_2GLD[1][None],
            attn_mask=self._seen_TL,
            is_causal=self._seen_TL is None,
            scale=scale,
            enable_gqa=q_THD.shape[1] != k_TGD.shape[1],
        )
        out_THD.copy_(out_1HTD[0].transpose(0, 1))
