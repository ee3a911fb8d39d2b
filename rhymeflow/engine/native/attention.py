"""Attention of one engine iteration: write new keys and values, attend through the cache.

On CPUs a compiled kernel does it (`cpu_attention.py`). Elsewhere, and in float64, torch does it in
blocks: the sequences of a size class that have few new tokens share one block, and a sequence with
many has a block of its own. In a shared block, the queries of all heads of a key-value head form
one matrix, [slots * G, W * H / G, D] against [slots * G, L, D], so keys and values are read once.
SDPA knows neither caps nor sinks: with them, scores are computed for a part of the rows at a time.
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
from rhymeflow.models.attention import Attention, Reach, Weighing

WIDEST = 33
"""Most new tokens of a sequence in a shared block, whose slots all get the rows of the widest."""

PAD = 32
"""Block lengths are rounded up to a multiple of this, which divides every size class's capacity:
CUDA's kernels need masks with aligned rows. So are the starts of windows."""

MOST_SCORES = 1 << 26
"""Scores that are computed at a time if they are capped or there is a sink: 256 MB."""


def attention_for(
    device: torch.device, dtype: torch.dtype, head_dim: int
) -> Callable[[list[CacheSpan]], Attention]:
    """Return a function that builds an iteration's attention: compiled where possible, on CPUs."""
    if serves(device, dtype, head_dim):
        return CpuAttention(dtype, head_dim).over
    return partial(CachedAttention, device=device)


class CachedAttention(Attention):
    """The `models.attention.Attention` of one iteration, in a few large products. Rows after the
    last span get zeros. Slots must not move while it is in use."""

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
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTE: Tensor, weighing: Weighing
    ) -> Tensor:
        """See `models.attention.Attention`; returns [T, H, D]."""
        heads, tokens, dim = q_HTD.shape
        out_THD = q_HTD.new_zeros(tokens, heads, dim)
        q_THD, k_TGD, v_TGD = (x.transpose(0, 1) for x in (q_HTD, k_GTD, v_GTE))
        for block in self._blocks:
            block.attend(layer, q_THD, k_TGD, v_TGD, weighing, out_THD)
        return out_THD


class _Block:
    """New tokens of sequences in one size class. All slots from the first sequence's to the last
    one's have the same number of rows, also slots of other sequences between them. Suffixes: S
    sequences, T their new tokens, B slots, W rows of a slot, P = B * W, L keys."""

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
        # Rows of slots between, which nobody reads, are at positions that see something.
        base_B = np.full(block_S.max() + 1, cached_S.min())
        base_B[block_S] = cached_S
        position_BW = base_B[:, None] + np.arange(width)
        self._seen_BWL = np.arange(longest) <= position_BW[..., None]
        self._position_BW = position_BW
        self._position_BL = np.tile(np.arange(longest), (len(base_B), 1))
        for span, block in zip(spans, block_S, strict=True):
            if span.parents:
                self._place_tree(span, block)
        self._first_new = int(cached_S.min())
        self._is_causal = self._is_wide and not spans[0].cached and not spans[0].parents
        self._device = device
        self._visible: dict[Reach, tuple[int, Tensor]] = {}
        self._added: dict[Reach, Tensor] = {}

    def _place_tree(self, span: CacheSpan, block: int) -> None:
        """A token of the tree sees only itself and its ancestors in it, and is one position after
        its parent."""
        assert span.parents is not None
        size, end = len(span.parents), span.cached + span.num_new
        seen_TT, root = np.eye(size, dtype=bool), end - size
        nodes = self._position_BW[block, span.num_new - size : span.num_new]
        for node, parent in enumerate(span.parents):
            if parent >= 0:
                seen_TT[node] |= seen_TT[parent]
            nodes[node] = nodes[parent] + 1 if parent >= 0 else root
        self._position_BL[block, root:end] = nodes
        self._seen_BWL[block, span.num_new - size : span.num_new, root:end] = seen_TT

    def _within(self, reach: Reach) -> tuple[int, Tensor]:
        """Return the first key that any new token sees in a layer, and which of the keys from there
        on each sees, [slots, W, L]."""
        if reach not in self._visible:
            first = reach.first(self._first_new) // PAD * PAD
            seen_BWL = self._seen_BWL
            if reach != Reach():
                places = self._position_BW[..., None], self._position_BL[:, None]
                seen_BWL = (seen_BWL & reach.sees(*places))[..., first:]
            self._visible[reach] = first, torch.from_numpy(seen_BWL).to(self._device)
        return self._visible[reach]

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        weighing: Weighing,
        out_THD: Tensor,
    ) -> None:
        """Write the new keys and values, then fill the block's rows of `out_THD`."""
        _, heads, dim = q_THD.shape
        for x_TGD, into in ((k_TGD, self._flat_keys), (v_TGD, self._flat_values)):
            into[layer].index_copy_(0, self._new_TG, x_TGD[self._row_T].reshape(-1, dim))
        reach = weighing.reach
        if not reach.first(self._kv.shape[-2] - 1):  # it is farther than anything is away
            reach = Reach()
        first, seen_BWL = self._within(reach)
        keys, values = self._kv[layer, ..., first:, :]
        num_slots, kv_heads = keys.shape[:2]
        if self._is_wide and weighing.is_plain:
            is_causal = self._is_causal and reach == Reach()
            out_1HTD = F.scaled_dot_product_attention(
                q_THD[self._row_T].transpose(0, 1)[None],
                keys,
                values,
                attn_mask=None if is_causal else seen_BWL[0],
                is_causal=is_causal,
                scale=weighing.scale,
                enable_gqa=heads != kv_heads,
            )
            out_THD[self._row_T] = out_1HTD[0].transpose(0, 1)
            return
        group = heads // kv_heads
        if reach not in self._added:  # to the scores, [slots, 1, W * H / G, L]
            seen_BRL = seen_BWL.repeat_interleave(group, 1)
            self._added[reach] = torch.where(seen_BRL, 0.0, -torch.inf)[:, None].to(q_THD)
        q_SWGHD = q_THD.index_select(0, self._row_P).view(num_slots, -1, kv_heads, group, dim)
        q_SGRD = q_SWGHD.transpose(1, 2).reshape(num_slots, kv_heads, -1, dim)
        attend = _by_sdpa if weighing.is_plain else _by_scores
        out_SGRD = attend(q_SGRD, keys, values, self._added[reach], weighing)
        out_SWGHD = out_SGRD.view(num_slots, kv_heads, -1, group, dim).transpose(1, 2)
        out_THD[self._row_T] = out_SWGHD.reshape(-1, heads, dim)[self._padded_T]


def _by_sdpa(
    q_SGRD: Tensor, keys: Tensor, values: Tensor, added_S1RL: Tensor, weighing: Weighing
) -> Tensor:
    return F.scaled_dot_product_attention(
        q_SGRD, keys, values, attn_mask=added_S1RL, scale=weighing.scale
    )


def _by_scores(
    q_SGRD: Tensor, keys: Tensor, values: Tensor, added_S1RL: Tensor, weighing: Weighing
) -> Tensor:
    """Do what SDPA does, with a cap and sinks, in float32 at least."""
    slots, kv_heads, rows, _ = q_SGRD.shape
    sink_GR1 = None
    if weighing.sink_H is not None:  # rows are in the order of tokens, then of the group's heads
        sink_GH = weighing.sink_H.view(kv_heads, -1)
        sink_GR1 = sink_GH.repeat(1, rows // sink_GH.shape[1])[..., None]
    kind = torch.promote_types(q_SGRD.dtype, torch.float32)
    k_SGDL, v_SGLD = keys.to(kind).transpose(-1, -2), values.to(kind)
    size = max(1, MOST_SCORES // (slots * kv_heads * keys.shape[2]))
    parts = []
    for start in range(0, rows, size):
        part = slice(start, start + size)
        scores = q_SGRD[:, :, part].to(kind) * weighing.scale @ k_SGDL
        if weighing.cap is not None:
            scores = scores.div_(weighing.cap).tanh_().mul_(weighing.cap)
        scores += added_S1RL[:, :, part]
        if sink_GR1 is not None:
            sink_SGR1 = sink_GR1[:, part].to(kind).expand(slots, -1, -1, -1)
            weights = torch.cat([scores, sink_SGR1], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        parts.append(weights @ v_SGLD)
    return torch.cat(parts, 2).to(q_SGRD.dtype)
