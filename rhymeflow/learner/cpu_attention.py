"""Attention within each sequence of a packed row on a CPU, by `cpu.packed_attention`.

The row is attended to as it lies: nothing is gathered, and the tokens of a shared prompt attend
once. The work is dealt out to as many threads as torch has; the result does not depend on that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rhymeflow.cpu import packed_attention, threads
from rhymeflow.cpu.tiles import LANES
from rhymeflow.learner.attention import PackedAttention, branches
from rhymeflow.models.attention import Attention


def serves(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernels take queries, keys and values of this kind."""
    is_known = dtype in (torch.float32, torch.bfloat16)
    return device.type == "cpu" and is_known and head_dim % LANES == 0


class CpuPackedAttention(Attention):
    """Causal attention inside each of `sequences`, which are places in a row of T tokens.

    Sequences that have tokens in common have their first ones in common.
    """

    def __init__(self, sequences: Sequence[np.ndarray], num_tokens: int, device: torch.device):
        assert device.type == "cpu", device
        self._given = sequences, num_tokens, device
        self._places = np.concatenate(sequences)
        self._longest = max(map(len, sequences))
        starts = branches(sequences, num_tokens)
        begins = np.cumsum([0, *map(len, sequences)])
        rows = [
            (begin, len(places), start)
            for begin, places, start in zip(begins[:-1], sequences, starts, strict=True)
            if start < len(places)  # else another has all of it
        ]
        self._sequences_S3 = np.array(rows)
        # What shares a token adds to the same gradients: one thread does it, in order.
        firsts = self._places[self._sequences_S3[:, 0]]
        self._trees = [np.flatnonzero(firsts == first) for first in np.unique(firsts)]
        self._jobs: dict[tuple[int, int], list[np.ndarray]] = {}

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scale: float
    ) -> Tensor:
        """See `models.attention.Attention`; returns [T, H, D]."""
        dim = q_HTD.shape[2]
        if dim % LANES or v_GTD.shape[2] != dim:  # as latent attention has; not for the kernels
            return PackedAttention(*self._given).attend(layer, q_HTD, k_GTD, v_GTD, scale)
        out_THD: Tensor = _Attend.apply(  # type: ignore[no-untyped-call]
            q_HTD, k_GTD, v_GTD, scale, self
        )
        return out_THD

    def _dealt(self, num_kv_heads: int, num_threads: int) -> list[np.ndarray]:
        """The kernels' items, one array for each thread: whole trees of a head, evenly dealt."""
        pieces = []
        for tree in self._trees:
            rows_S3 = self._sequences_S3[tree]
            lengths, starts = rows_S3[:, 1], rows_S3[:, 2]
            work = int((lengths**2 - starts**2).sum())
            for head in range(num_kv_heads):
                pieces.append((work, np.insert(rows_S3, 0, head, axis=1)))
        pieces.sort(key=lambda piece: -piece[0])
        count = min(num_threads, len(pieces))
        dealt: list[list[np.ndarray]] = [[] for _ in range(count)]
        loads = [0] * count
        for work, items in pieces:
            least = loads.index(min(loads))
            loads[least] += work
            dealt[least].append(items)
        return [np.concatenate(items) for items in dealt]

    def run(self, kernel: Callable[..., None], *arrays: Any, sizes: tuple[int, int, int]) -> None:
        """Call a kernel for every job."""
        key = sizes[1], torch.get_num_threads()
        if key not in self._jobs:
            self._jobs[key] = self._dealt(*key)
        jobs = self._jobs[key]

        def call(items: np.ndarray) -> None:
            kernel(
                *arrays, sizes, items, self._places, packed_attention.room(self._longest, sizes[2])
            )

        threads.run(call, jobs, len(jobs))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_HTD: Tensor,
        k_GTD: Tensor,
        v_GTD: Tensor,
        scale: float,
        packed: CpuPackedAttention,
    ) -> Tensor:
        rows = [x.transpose(0, 1).contiguous() for x in (q_HTD, k_GTD, v_GTD)]
        tokens, heads, dim = rows[0].shape
        out_THD = torch.empty(tokens, heads, dim)
        log_sums_TH = torch.empty(tokens, heads)
        ctx.sizes, ctx.scale, ctx.packed = (heads, len(k_GTD), dim), np.float32(scale), packed
        given = _flat(*rows, out_THD, log_sums_TH)
        packed.run(packed_attention.attend, *given, ctx.scale, sizes=ctx.sizes)
        out = out_THD.to(q_HTD.dtype)
        ctx.save_for_backward(*rows, out, log_sums_TH)
        return out

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sums = ctx.saved_tensors
        grad_q = torch.empty(q.shape)
        grad_k, grad_v = torch.zeros(k.shape), torch.zeros(v.shape)
        given = _flat(q, k, v, out, log_sums, grad_THD.contiguous(), grad_q, grad_k, grad_v)
        ctx.packed.run(packed_attention.differentiate, *given, ctx.scale, sizes=ctx.sizes)
        gradients = (x.to(q.dtype).transpose(0, 1) for x in (grad_q, grad_k, grad_v))
        return (*gradients, None, None)


def _flat(*tensors: Tensor) -> list[np.ndarray]:
    return [x.detach().float().reshape(-1).numpy() for x in tensors]
