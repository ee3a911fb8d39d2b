"""Attention of one engine iteration: write new keys and values, attend through the cache.

The row holds, sequence by sequence, the tokens that run in this iteration. Sequences that run one
token and have neighbouring slots are attended to together (`_Decode`), any other by itself
(`_Chunk`), whatever its number of new tokens. In a decode group the query heads that share a
key-value head are rows of one small matrix, [slots * G, H / G, D] against [slots * G, L, D], so
keys and values are read once and never repeated or copied. `keys @ queries^T` is twice as fast on
CPUs as its transpose, and scores come back to float32 for the softmax.

Holds true: everything that does not depend on the layer is made once per iteration. Knows nothing
of requests or scheduling.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rhymeflow.engine.cache import Slot

PAD = 32
"""Lengths of decode groups are rounded up to this, a divisor of every shelf's capacity: oneDNN
takes as long to prepare a product of a new shape as to run it (0.3 ms), so shapes should repeat."""


class Span(NamedTuple):
    """One sequence's part of the row: `num_new` tokens after `cached` ones.

    Each follows the one before it, but for the last ones if `parents` are given: the tree that
    hangs on the token before them, for each of its tokens the place in the tree of its parent.
    """

    slot: Slot
    cached: int
    num_new: int
    parents: list[int] | None = None


class CachedAttention:
    """The `models.attention.Attention` of one iteration.

    `spans` are in row order. Slots must not move while it is in use.
    """

    def __init__(self, spans: list[Span], device: torch.device) -> None:
        self._parts: list[_Decode | _Chunk] = []
        start = 0
        for group in _grouped(spans):
            if group[0].num_new == 1:
                self._parts.append(_Decode(group, start, device))
            else:
                self._parts.append(_Chunk(group[0], start, device))
            start += sum(span.num_new for span in group)

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scale: float
    ) -> Tensor:
        """See `models.attention.Attention`; returns [T, H, D]."""
        heads, tokens, dim = q_HTD.shape
        q_THD, k_TGD, v_TGD = q_HTD.transpose(0, 1), k_GTD.transpose(0, 1), v_GTD.transpose(0, 1)
        out_THD = q_HTD.new_empty(tokens, heads, dim)
        for part in self._parts:
            rows = part.rows
            part.attend(layer, q_THD[rows], k_TGD[rows], v_TGD[rows], scale, out_THD[rows])
        return out_THD


def row_order(spans: list[Span]) -> list[int]:
    """Order in which sequences form the fewest groups: decoding ones by slot, then the others."""
    return sorted(
        range(len(spans)),
        key=lambda i: (
            spans[i].num_new > 1,
            spans[i].slot.shelf.capacity,
            spans[i].slot.index,
        ),
    )


def _grouped(spans: list[Span]) -> list[list[Span]]:
    """Runs of one-token spans in neighbouring slots; every other span alone."""
    groups: list[list[Span]] = []
    for span in spans:
        last = groups[-1][-1] if groups else None
        if (
            last is not None
            and span.num_new == last.num_new == 1
            and span.slot.shelf is last.slot.shelf
            and span.slot.index == last.slot.index + 1
        ):
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


class _Decode:
    """One new token for each of N sequences in neighbouring slots of one shelf."""

    def __init__(self, spans: list[Span], start: int, device: torch.device) -> None:
        shelf, first = spans[0].slot.shelf, spans[0].slot.index
        num = len(spans)
        self.rows = slice(start, start + num)
        lengths = [span.cached + 1 for span in spans]
        longest = -(-max(lengths) // PAD) * PAD
        keys, values = shelf.kv[:, :, first : first + num, :, :longest].flatten(2, 3).unbind(1)
        self._keys, self._values = keys.unbind(0), values.unbind(0)
        self._flat_keys, self._flat_values = shelf.flat_keys, shelf.flat_values
        kv_heads = shelf.kv.shape[3]
        self._new_NG = _places(spans, kv_heads, shelf.capacity, device)
        self._mask_NL = None
        if min(lengths) < longest:
            length_N = torch.tensor(lengths, device=device).repeat_interleave(kv_heads)
            hidden_NL = torch.arange(longest, device=device) >= length_N[:, None]
            self._mask_NL = torch.zeros(hidden_NL.shape, device=device)
            self._mask_NL = self._mask_NL.masked_fill_(hidden_NL, -torch.inf)[:, None]

    def attend(
        self, layer: int, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, scale: float, out_NHD: Tensor
    ) -> None:
        """Write the new keys and values, then fill `out_NHD`."""
        dim = q_NHD.shape[2]
        pairs = self._new_NG.shape[0]  # of sequence and key-value head
        self._flat_keys[layer].index_copy_(0, self._new_NG, k_NGD.reshape(pairs, dim))
        self._flat_values[layer].index_copy_(0, self._new_NG, v_NGD.reshape(pairs, dim))
        q_PRD = q_NHD.reshape(pairs, -1, dim)
        scores_PRL = torch.bmm(self._keys[layer], q_PRD.transpose(1, 2)).transpose(1, 2)
        if self._mask_NL is None:
            weights_PRL = torch.softmax(scores_PRL.float() * scale, -1)
        else:
            weights_PRL = torch.softmax(torch.add(self._mask_NL, scores_PRL, alpha=scale), -1)
        torch.bmm(
            weights_PRL.to(q_NHD.dtype), self._values[layer], out=out_NHD.view(pairs, -1, dim)
        )


class _Chunk:
    """Any number of new tokens of one sequence."""

    def __init__(self, span: Span, start: int, device: torch.device) -> None:
        self.rows = slice(start, start + span.num_new)
        self._span = span
        self._kv = span.slot.shelf.kv[:, :, span.slot.index]
        self._seen_TL = None
        if span.cached or span.parents:
            total = span.cached + span.num_new
            own_T = torch.arange(span.cached, total, device=device)
            self._seen_TL = torch.arange(total, device=device) <= own_T[:, None]
        if span.parents:
            size = len(span.parents)
            seen_NN = torch.eye(size, dtype=torch.bool)
            for node, parent in enumerate(span.parents):
                if parent >= 0:
                    seen_NN[node] |= seen_NN[parent]
            self._seen_TL[-size:, -size:] = seen_NN.to(device)

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


def _places(spans: list[Span], kv_heads: int, capacity: int, device: torch.device) -> Tensor:
    """Where in a flat shelf each sequence's next token goes, [N * G]."""
    slot_N1 = torch.tensor([[span.slot.index] for span in spans])
    next_N1 = torch.tensor([[span.cached] for span in spans])
    place_NG = (slot_N1 * kv_heads + torch.arange(kv_heads)) * capacity + next_N1
    return place_NG.flatten().to(device)


__all__ = ["CachedAttention", "Span", "row_order"]
