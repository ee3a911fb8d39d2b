"""Attention of one engine iteration: write new keys and values, attend through the cache.

On CPUs a compiled kernel does it (`cpu_attention.py`). Elsewhere, and in float64, torch does it in
blocks: the sequences of a size class that have few new tokens share one block, and a sequence with
many has a block of its own. In a shared block, the queries of all heads of a key-value head form
one matrix, [slots * G, W * H / G, D] against [slots * G, L, D], so keys and values are read once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rhymeflow.engine.native.cache import CacheSpan
from rhymeflow.engine.native.cpu_attention import CpuAttention, serves
from rhymeflow.models.attention import Attention

WIDEST = 33
"""Most new tokens of a sequence in a shared block, whose slots all get the rows of the widest."""

PAD = 32
"""Block lengths are rounded up to a multiple of this, which divides every size class's capacity:
CUDA's kernels need masks with aligned rows."""


def attention_for(
    device: torch.device, dtype: torch.dtype, head_dim: int
) -> Callable[[list[CacheSpan]], Attention]:
    """Return a function that builds an iteration's attention: compiled where possible, on CPUs."""
    if serves(device, dtype, head_dim):
        return CpuAttention(dtype, head_dim).over
    return partial(CachedAttention, device=device)


class CachedAttention(Attention):
    """The `models.attention.Attention` of one iteration, in a few large products.

    Rows after the last span get zeros. Slots must not move while it is in use.
    """

    def __init__(self, spans: list[CacheSpan], device: torch.device) -> None:
        self.cache_shape = spans[0].slot.size_class.shape
        blocks: dict[tuple[int, int | None], list[tuple[CacheSpan, int]]] = {}
        start = 0
        for span in spans:
            own_start = start if span.num_new > WIDEST else None
            blocks.setdefault((span.slot.size_class.capacity, own_start), []).append((span, start))
            start += span.num_new
        self._blocks = [_Block(members, device) for members in blocks.values()]

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scale: float
    ) -> Tensor:
        """See `models.attention.Attention`; returns [T, H, D]."""
        heads, tokens, dim = q_HTD.shape
        out_THD = q_HTD.new_zeros(tokens, heads, dim)
        q_THD, k_TGD, v_TGD = (x.transpose(0, 1) for x in (q_HTD, k_GTD, v_GTD))
        for block in self._blocks:
            block.attend(layer, q_THD, k_TGD, v_TGD, scale, out_THD)
        return out_THD


class _Block:
    """New tokens of sequences in one size class. All slots from the first sequence's to the last
    one's have the same number of rows, also slots of other sequences between them.

    Suffixes: S sequences, T their new tokens, B slots, W rows of a slot, P = B * W, L keys.
    """

    def __init__(self, members: list[tuple[CacheSpan, int]], device: torch.device) -> None:
        """`members`: each span with its first row in the packed row."""
        spans = [span for span, _ in members]
        start_S = np.array([start for _, start in members])
        slot_S = np.array([span.slot.index for span in spans])
        cached_S = np.array([span.cached for span in spans])
        size_S = np.array([span.num_new for span in spans])
        # For each new token: its sequence, offset in its span, index in the packed row.
        span_T = np.repeat(np.arange(len(spans)), size_S)
        offset_T = np.arange(len(span_T)) - np.repeat(np.cumsum(size_S) - size_S, size_S)
        row_T = start_S[span_T] + offset_T
        first, width = slot_S.min(), int(size_S.max())
        block_S = slot_S - first
        padded_T = block_S[span_T] * width + offset_T
        row_P = np.zeros((block_S.max() + 1) * width, dtype=np.int64)
        row_P[padded_T] = row_T
        size_class = spans[0].slot.size_class
        self._is_wide = width > WIDEST
        longest = int((cached_S + size_S).max())
        if not self._is_wide:
            longest = -(-longest // PAD) * PAD
        self._kv = size_class.kv[:, :, first : slot_S.max() + 1, :, :longest]
        self._flat_keys, self._flat_values = size_class.flat_keys, size_class.flat_values
        kv_heads = size_class.shape.kv_heads
        group_TG = slot_S[span_T, None] * kv_heads + np.arange(kv_heads)
        new_TG = group_TG * size_class.capacity + (cached_S[span_T] + offset_T)[:, None]
        indices = row_T, padded_T, row_P, new_TG.ravel()
        index_N = torch.from_numpy(np.concatenate(indices)).to(device)  # one copy to the device
        parts = index_N.split([len(each) for each in indices])
        self._row_T, self._padded_T, self._row_P, self._new_TG = parts
        last_seen_BW = np.arange(width) + np.zeros((block_S.max() + 1, 1), dtype=np.int64)
        last_seen_BW[block_S] += cached_S[:, None]
        self._seen_BWL = torch.arange(longest) <= torch.from_numpy(last_seen_BW)[..., None]
        for span, block in zip(spans, block_S, strict=True):
            if span.parents:  # a token of the tree sees only itself and its ancestors in it
                size = len(span.parents)
                seen_TT = np.eye(size, dtype=bool)
                for node, parent in enumerate(span.parents):
                    if parent >= 0:
                        seen_TT[node] |= seen_TT[parent]
                seen_WL = self._seen_BWL[block, : span.num_new, : span.cached + span.num_new]
                seen_WL[-size:, -size:] = torch.from_numpy(seen_TT)
        self._seen_BWL = self._seen_BWL.to(device)
        self._is_causal = self._is_wide and not spans[0].cached and not spans[0].parents
        self._mask: Tensor | None = None

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float, out_THD: Tensor
    ) -> None:
        """Write the new keys and values, then fill the block's rows of `out_THD`."""
        _, heads, dim = q_THD.shape
        for x_TGD, into in ((k_TGD, self._flat_keys), (v_TGD, self._flat_values)):
            into[layer].index_copy_(0, self._new_TG, x_TGD[self._row_T].reshape(-1, dim))
        keys, values = self._kv[layer]
        num_slots, kv_heads = keys.shape[:2]
        if self._is_wide:
            out_1HTD = F.scaled_dot_product_attention(
                q_THD[self._row_T].transpose(0, 1)[None],
                keys,
                values,
                attn_mask=None if self._is_causal else self._seen_BWL[0],
                is_causal=self._is_causal,
                scale=scale,
                enable_gqa=heads != kv_heads,
            )
            out_THD[self._row_T] = out_1HTD[0].transpose(0, 1)
            return
        group = heads // kv_heads
        if self._mask is None:  # added to the scores, [slots, 1, W * H / G, L]
            seen_BRL = self._seen_BWL.repeat_interleave(group, 1)
            self._mask = torch.where(seen_BRL, 0.0, -torch.inf)[:, None].to(q_THD)
        q_SWGHD = q_THD.index_select(0, self._row_P).view(num_slots, -1, kv_heads, group, dim)
        q_SGRD = q_SWGHD.transpose(1, 2).reshape(num_slots, kv_heads, -1, dim)
        out_SGRD = F.scaled_dot_product_attention(
            q_SGRD, keys, values, attn_mask=self._mask, scale=scale
        )
        out_SWGHD = out_SGRD.view(num_slots, kv_heads, -1, group, dim).transpose(1, 2)
        out_THD[self._row_T] = out_SWGHD.reshape(-1, heads, dim)[self._padded_T]
