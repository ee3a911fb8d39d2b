"""Attention within each sequence of a packed row, as a `models.attention.Attention`.

`PackedAttention` runs causal SDPA on sequences of similar length in padded rectangles, and scatters
the results back. `FlexAttention` is for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from rhymeflow.learner.rectangles import Rectangles
from rhymeflow.models.attention import Attention, Reach, Weighing


class PackedAttention(Attention):
    """Causal attention inside each of `sequences`, given as indices into a row of T tokens."""

    def __init__(self, sequences: Sequence[np.ndarray], num_tokens: int, device: torch.device):
        self._rectangles = Rectangles(sequences, num_tokens, device)

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTE: Tensor, weighing: Weighing
    ) -> Tensor:
        """See `models.attention.Attention`; returns [T, H, E]."""
        blocks = zip(self._gather(q_HTD), self._gather(k_GTD), self._gather(v_GTE), strict=True)
        attend = _by_sdpa if weighing.cap is None else _by_scores
        outputs_BLHE = []
        for q_BHLD, k_BGLD, v_BGLE in blocks:
            length = q_BHLD.shape[2]
            seen_LL = None
            if weighing.reach.first(length - 1):  # else it is farther than anything is away
                place_L = torch.arange(length, device=q_BHLD.device)
                seen_LL = weighing.reach.sees(place_L[:, None], place_L)
            out_BHLE = attend(q_BHLD, k_BGLD, v_BGLE, seen_LL, weighing)
            outputs_BLHE.append(out_BHLE.transpose(1, 2))
        return self._rectangles.scatter(outputs_BLHE)

    def _gather(self, x_HTD: Tensor) -> list[Tensor]:
        return [x.transpose(1, 2) for x in self._rectangles.gather(x_HTD.transpose(0, 1))]


ADDED = 8
"""Numbers added to each head for a sink: one is used, and CUDA's kernels need multiples of 8."""


def _by_sdpa(
    q_BHLD: Tensor, k_BGLD: Tensor, v_BGLE: Tensor, seen_LL: Tensor | None, weighing: Weighing
) -> Tensor:
    """Attend to earlier places of the same row, or to those in `seen_LL`. A sink becomes one more
    token before the first. Its key is 0 but for an added number, by which each query's added number
    is multiplied; its value is 0. The query beside it is not used."""
    is_grouped, width = q_BHLD.shape[1] != k_BGLD.shape[1], v_BGLE.shape[3]
    if weighing.sink_H is not None:
        batch, heads, length, dim = q_BHLD.shape
        sink_H1 = (weighing.sink_H / weighing.scale).to(q_BHLD.dtype)[:, None, None]
        sink_BHLA = F.pad(sink_H1, (0, ADDED - 1)).expand(batch, heads, length, ADDED)
        q_BHLD = F.pad(torch.cat([q_BHLD, sink_BHLA], -1), (0, 0, 1, 0))
        k_BGLD, v_BGLE = (F.pad(x, (0, ADDED, 1, 0)) for x in (k_BGLD, v_BGLE))
        is_sink_LD = torch.zeros_like(k_BGLD[0, 0])
        is_sink_LD[0, dim] = 1
        k_BGLD = k_BGLD + is_sink_LD
        seen_LL = None if seen_LL is None else F.pad(seen_LL, (1, 0, 1, 0), value=True)
    out_BHLE = F.scaled_dot_product_attention(
        q_BHLD,
        k_BGLD,
        v_BGLE,
        attn_mask=seen_LL,
        is_causal=seen_LL is None,
        scale=weighing.scale,
        enable_gqa=is_grouped,
    )
    return out_BHLE if weighing.sink_H is None else out_BHLE[:, :, 1:, :width]


def _by_scores(
    q_BHLD: Tensor, k_BGLD: Tensor, v_BGLE: Tensor, seen_LL: Tensor | None, weighing: Weighing
) -> Tensor:
    """Do the same with a cap, which SDPA lacks; all scores are kept for the backward pass."""
    assert weighing.cap is not None
    batch, heads, length, _ = q_BHLD.shape
    kind = torch.promote_types(q_BHLD.dtype, torch.float32)
    group = heads // k_BGLD.shape[1]
    k_BHLD, v_BHLE = (x.to(kind).repeat_interleave(group, 1) for x in (k_BGLD, v_BGLE))
    scores_BHLL = q_BHLD.to(kind) @ k_BHLD.transpose(2, 3) * (weighing.scale / weighing.cap)
    scores_BHLL = weighing.cap * scores_BHLL.tanh()
    if seen_LL is None:
        seen_LL = torch.ones(length, length, dtype=torch.bool, device=q_BHLD.device).tril()
    scores_BHLL = scores_BHLL.masked_fill(~seen_LL, -torch.inf)
    if weighing.sink_H is not None:
        sink_BHL1 = weighing.sink_H.to(kind)[:, None, None].expand(batch, heads, length, 1)
        scores_BHLL = torch.cat([scores_BHLL, sink_BHL1], -1)
    weights_BHLL = scores_BHLL.softmax(-1)[..., :length]
    return (weights_BHLL @ v_BHLE).to(q_BHLD.dtype)


BLOCK = 128  # tokens per block of the mask, FlexAttention's default


class FlexAttention(Attention):
    """Causal attention inside each of `sequences`, given as indices into a row of T tokens.

    Two sequences may share only a prefix, so the row is a forest. It is attended to in place, with
    shared tokens computed once, and padded to whole blocks to bound the number of compiled shapes.
    On CPUs there is no backward pass."""

    def __init__(self, sequences: Sequence[np.ndarray], num_tokens: int, device: torch.device):
        self._num_tokens = num_tokens
        self._padding = -num_tokens % BLOCK
        self._length, self._device = num_tokens + self._padding, device
        # Each padding token attends to itself.
        padding = np.arange(num_tokens, self._length)
        self._enter_T, self._leave_T = (
            torch.from_numpy(np.r_[number_T, padding + i]).to(device)
            for i, number_T in enumerate(visits(sequences, num_tokens))
        )
        self._sequences = sequences
        self._masks: dict[Reach, BlockMask] = {}
        self._mask(Reach())
        self._attention: Any = _compiled() if device.type == "cuda" else flex_attention

    def _mask(self, reach: Reach) -> BlockMask:
        if reach not in self._masks:
            enter_T, leave_T = self._enter_T, self._leave_T
            is_far = reach == Reach()
            position_T = enter_T if is_far else self._positions()

            def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return (enter_T[key] <= enter_T[query]) & (enter_T[query] < leave_T[key])

            def sees_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                near: Tensor = reach.sees(position_T[query], position_T[key])
                return sees(batch, head, query, key) & near

            mask, size = sees if is_far else sees_near, self._length
            self._masks[reach] = create_block_mask(
                mask, None, None, size, size, device=self._device, BLOCK_SIZE=BLOCK
            )
        return self._masks[reach]

    def _positions(self) -> Tensor:
        """Return each token's position in its sequences; those of padding do not matter."""
        position_T = np.zeros(self._length, dtype=np.int64)
        for places in self._sequences:
            position_T[places] = np.arange(len(places))
        return torch.from_numpy(position_T).to(self._device)

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTE: Tensor, weighing: Weighing
    ) -> Tensor:
        """See `models.attention.Attention`; returns [T, H, E]."""
        padded = (F.pad(x, (0, 0, 0, self._padding))[None] for x in (q_HTD, k_GTD, v_GTE))
        has_sink = weighing.sink_H is not None
        found = self._attention(
            *padded,
            score_mod=None if weighing.cap is None else _capping(weighing.cap),
            block_mask=self._mask(weighing.reach),
            scale=weighing.scale,
            enable_gqa=q_HTD.shape[0] != k_GTD.shape[0],
            return_aux=AuxRequest(lse=True) if has_sink else None,
        )
        out_1HTE: Tensor = found[0] if has_sink else found
        if weighing.sink_H is not None:
            share_1HT = (found[1].lse - weighing.sink_H[:, None]).sigmoid()  # of all but the sink
            out_1HTE = (out_1HTE * share_1HT[..., None]).to(out_1HTE.dtype)
        return out_1HTE[0, :, : self._num_tokens].transpose(0, 1)


@cache
def _capping(cap: float) -> Callable[..., Tensor]:
    """Return what caps FlexAttention's scores; the same for the same cap, to compile it once."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


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
    return torch.compile(flex_attention, dynamic=True)
