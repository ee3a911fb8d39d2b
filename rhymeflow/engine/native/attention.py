"""Attention of one engine iteration: write new keys and values, attend through the cache.

On CPUs a compiled kernel does it (`cpu_attention.py`). Elsewhere, and in float64, it is done here
in a few of torch's products. Sequences that run few tokens are attended to together (`_Block`), any
other by itself (`_Chunk`). A block's rows of all query heads that share a key-value head are one
matrix, [slots * G, W * H / G, D] against [slots * G, L, D]: keys and values are read once for all.
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
from rhymeflow.engine.native.cache import SizeClass
from rhymeflow.engine.native.cpu_attention import CpuAttention
from rhymeflow.engine.native.packing import Part, Span, arranged
from rhymeflow.models.attention import Attention

PAD = 32
"""Lengths of blocks are rounded up to this, a divisor of every size class's capacity, so that
shapes repeat."""


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
        parts = arranged(spans)
        self.order = [i for part in parts for i in part.members]
        """The spans' places in the list, in the order in which the row has them."""
        self.holds = spans[0].slot.size_class.shape
        self._parts: list[_Block | _Chunk] = []
        start = 0
        for part in parts:
            members = [spans[i] for i in part.members]
            if part.width:
                self._parts.append(_Block(members, part, start, device))
            else:
                self._parts.append(_Chunk(members[0], start, device))
            start = self._parts[-1].rows.stop
        self._end = start

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
    """At most `part.width` new tokens for each of some sequences in one size class."""

    def __init__(self, spans: list[Span], part: Part, start: int, device: torch.device) -> None:
        size_class = spans[0].slot.size_class
        slot_S = np.array([span.slot.index for span in spans])
        cached_S = np.array([span.cached for span in spans])
        size_S = np.array([span.num_new for span in spans])
        # Where each row of the block's part of the packed row belongs: sequence, place in it.
        span_T = np.repeat(np.arange(len(spans)), size_S)
        place_T = np.arange(len(span_T)) - np.repeat(np.cumsum(size_S) - size_S, size_S)
        self.rows = slice(start, start + len(span_T))
        first = slot_S[0] if part.is_run else 0
        self._num = int(slot_S[-1] - first + 1) if part.is_run else len(spans)
        block_S = slot_S - first if part.is_run else np.arange(len(spans))
        padded_T = block_S[span_T] * part.width + place_T
        self._width = part.width
        self._padded_T = self._row_P = None
        if self._num * part.width != len(span_T):
            row_P = np.zeros(self._num * part.width, dtype=np.int64)
            row_P[padded_T] = np.arange(len(span_T))
            self._padded_T = torch.from_numpy(padded_T).to(device)
            self._row_P = torch.from_numpy(row_P).to(device)
        longest = -(-int((cached_S + size_S).max()) // PAD) * PAD
        self._set_cache(size_class, slot_S, longest, part.is_run, device)
        kv_heads = size_class.kv.shape[3]
        group_TG = slot_S[span_T, None] * kv_heads + np.arange(kv_heads)
        new_TG = group_TG * size_class.capacity + (cached_S[span_T] + place_T)[:, None]
        self._new_TG = torch.from_numpy(new_TG.ravel()).to(device)
        seen_S = np.zeros(self._num, dtype=np.int64)
        seen_S[block_S] = cached_S
        self._mask = _mask(spans, block_S, seen_S, part.width, longest, device)

    def _set_cache(
        self,
        size_class: SizeClass,
        slot_S: np.ndarray,
        longest: int,
        is_run: bool,
        device: torch.device,
    ) -> None:
        """Where the block's keys and values are read: per layer [slots, G, L, D]."""
        self._flat_keys, self._flat_values = size_class.flat_keys, size_class.flat_values
        self._slot_S = None
        if is_run:
            kv = size_class.kv[:, :, int(slot_S[0]) : int(slot_S[-1]) + 1, :, :longest]
        else:
            kv = size_class.kv[:, :, :, :, :longest]
            self._slot_S = torch.from_numpy(slot_S).to(device)
        keys, values = kv.unbind(1)
        self._keys, self._values = keys.unbind(0), values.unbind(0)

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float, out_THD: Tensor
    ) -> None:
        """Write the new keys and values, then fill `out_THD`."""
        _, heads, dim = q_THD.shape
        self._flat_keys[layer].index_copy_(0, self._new_TG, k_TGD.reshape(-1, dim))
        self._flat_values[layer].index_copy_(0, self._new_TG, v_TGD.reshape(-1, dim))
        keys, values = self._keys[layer], self._values[layer]
        if self._slot_S is not None:
            keys, values = keys.index_select(0, self._slot_S), values.index_select(0, self._slot_S)
        num, kv_heads, width = self._num, k_TGD.shape[1], self._width
        sizes = (num, width, kv_heads, heads // kv_heads, dim)
        if self._row_P is not None:
            q_THD = q_THD.index_select(0, self._row_P)
        q_SGRD = q_THD.reshape(sizes).transpose(1, 2).reshape(num, kv_heads, -1, dim)
        if self._mask is not None and (
            self._mask.shape[2] != q_SGRD.shape[2] or self._mask.dtype != q_THD.dtype
        ):
            # A row for each head, once per iteration.
            mask_S1RL = self._mask.repeat_interleave(sizes[3], 2)
            self._mask = mask_S1RL.to(q_THD.dtype)
        out_SGRD = F.scaled_dot_product_attention(
            q_SGRD, keys, values, attn_mask=self._mask, scale=scale
        )
        out_SWGHD = out_SGRD.view(num, kv_heads, width, -1, dim).transpose(1, 2)
        if self._padded_T is None:
            out_THD.view(sizes).copy_(out_SWGHD)
        else:
            torch.index_select(out_SWGHD.reshape(-1, heads, dim), 0, self._padded_T, out=out_THD)


def _mask(
    spans: list[Span],
    block_S: np.ndarray,
    seen_B: np.ndarray,
    width: int,
    longest: int,
    device: torch.device,
) -> Tensor | None:
    """What is added to scores, [slots, 1, W, L] of 0 and -inf; None if all is seen."""
    if width == 1 and seen_B.min() == longest - 1:
        return None
    seen_BW = torch.from_numpy(seen_B[:, None] + np.arange(width))
    seen_BWL = torch.arange(longest) <= seen_BW[..., None]
    trees = [i for i, span in enumerate(spans) if span.parents]
    if trees:
        _hide_strangers(seen_BWL, [spans[i] for i in trees], block_S[trees])
    return torch.where(seen_BWL, 0.0, -torch.inf)[:, None].to(device)


def _hide_strangers(seen_BWL: Tensor, spans: list[Span], block_S: np.ndarray) -> None:
    """Each token of a tree sees, of the tree, its ancestors and itself only."""
    blocks, rows, columns, seen = [], [], [], []
    for span, block in zip(spans, block_S, strict=True):
        ancestors = ancestors_of(span.parents or [])
        size = len(ancestors)
        node_N = np.arange(size)
        seen_NN = (np.array(ancestors)[:, None] >> node_N) & 1
        blocks.append(np.full(size * size, block))
        rows.append(np.repeat(span.num_new - size + node_N, size))
        columns.append(np.tile(span.cached + span.num_new - size + node_N, size))
        seen.append(seen_NN.ravel() == 1)
    where = tuple(torch.from_numpy(np.concatenate(x)) for x in (blocks, rows, columns))
    seen_BWL[where] = torch.from_numpy(np.concatenate(seen))


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
            size = len(span.parents)
            seen = [[bits >> i & 1 for i in range(size)] for bits in ancestors_of(span.parents)]
            assert self._seen_TL is not None
            self._seen_TL[-size:, -size:] = torch.tensor(seen, dtype=torch.bool, device=device)

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
