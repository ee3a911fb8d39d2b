"""Attention within each sequence of a packed row on a CPU, by `cpu.packed_attention`.

The row is attended to in place: nothing is gathered, and shared tokens attend once. The work is
divided among as many threads as torch uses; the result does not depend on their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rhymeflow.cpu import attention, packed_attention, threads
from rhymeflow.cpu.tiles import LANES
from rhymeflow.learner.attention import branches
from rhymeflow.models.attention import Attention, Weighing, narrowed, widened


def serves(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether the kernels support queries, keys and values of this kind."""
    is_known = dtype in (torch.float32, torch.bfloat16)
    return device.type == "cpu" and is_known and head_dim % LANES == 0


class CpuPackedAttention(Attention):
    """Causal attention inside each of `sequences`, given as indices into a row of T tokens; two of
    them may share only a prefix."""

    def __init__(self, sequences: Sequence[np.ndarray], num_tokens: int, device: torch.device):
        assert device.type == "cpu", device
        self._places = np.concatenate(sequences)
        self._longest = max(map(len, sequences))
        starts = branches(sequences, num_tokens)
        begins = np.cumsum([0, *map(len, sequences)])
        rows = [
            (begin, len(places), start)
            for begin, places, start in zip(begins[:-1], sequences, starts, strict=True)
            if start < len(places)
        ]
        # Each with tokens of its own: start in `_places`, length, and its first own token.
        self._sequences_S3 = np.array(rows)
        # Sequences that share a token add to the same gradients, so one thread does them, in order.
        firsts = self._places[self._sequences_S3[:, 0]]
        self._trees = [np.flatnonzero(firsts == first) for first in np.unique(firsts)]
        self._jobs: dict[tuple[int, int], list[np.ndarray]] = {}

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTE: Tensor, weighing: Weighing
    ) -> Tensor:
        """See `models.attention.Attention`; returns [T, H, E]."""
        width = v_GTE.shape[2]
        whole = -(-max(width, q_HTD.shape[2]) // LANES) * LANES
        q_HTD, k_GTD, v_GTE = (widened(x, whole) for x in (q_HTD, k_GTD, v_GTE))
        out_THD: Tensor = _Attend.apply(  # type: ignore[no-untyped-call]
            q_HTD, k_GTD, v_GTE, weighing.sink_H, weighing, self
        )
        return narrowed(out_THD, width)

    def _split(self, num_kv_heads: int, num_threads: int) -> list[np.ndarray]:
        """Return the kernels' items, one array per thread: whole trees of a head, by equal work."""
        pieces = []
        for tree in self._trees:
            rows_S3 = self._sequences_S3[tree]
            lengths, starts = rows_S3[:, 1], rows_S3[:, 2]
            work = int((lengths**2 - starts**2).sum())
            for head in range(num_kv_heads):
                pieces.append((work, np.insert(rows_S3, 0, head, axis=1)))
        pieces.sort(key=lambda piece: -piece[0])
        count = min(num_threads, len(pieces))
        jobs: list[list[np.ndarray]] = [[] for _ in range(count)]
        loads = [0] * count
        for work, items in pieces:
            idlest = loads.index(min(loads))
            loads[idlest] += work
            jobs[idlest].append(items)
        return [np.concatenate(items) for items in jobs]

    def run(self, kernel: Callable[..., None], *arrays: Any, sizes: tuple[int, int, int]) -> None:
        """Run a kernel on all items, one job per thread."""
        _, num_kv_heads, head_dim = sizes
        key = num_kv_heads, torch.get_num_threads()
        if key not in self._jobs:
            self._jobs[key] = self._split(*key)
        jobs = self._jobs[key]

        def call(items: np.ndarray) -> None:
            room = packed_attention.room(self._longest, head_dim)
            kernel(*arrays, sizes, items, self._places, room)

        threads.run(call, jobs, len(jobs))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_HTD: Tensor,
        k_GTD: Tensor,
        v_GTD: Tensor,
        sink_H: Tensor | None,
        weighing: Weighing,
        packed: CpuPackedAttention,
    ) -> Tensor:
        rows = [x.transpose(0, 1).contiguous() for x in (q_HTD, k_GTD, v_GTD)]
        tokens, heads, dim = rows[0].shape
        out_THD = torch.empty(tokens, heads, dim)
        log_sums_TH = torch.empty(tokens, heads)
        sinks = None if sink_H is None else _flat(sink_H)[0]
        limits = attention.limits(*weighing.reach, weighing.cap, sinks, heads)
        ctx.sizes, ctx.packed = (heads, len(k_GTD), dim), packed
        ctx.how = np.float32(weighing.scale), *limits
        arrays = _flat(*rows, out_THD, log_sums_TH)
        packed.run(packed_attention.attend, *arrays, *ctx.how, sizes=ctx.sizes)
        out = out_THD.to(q_HTD.dtype)
        ctx.save_for_backward(*rows, out, log_sums_TH, sink_H)
        return out

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sums, sink_H = ctx.saved_tensors
        grad_q = torch.empty(q.shape)
        grad_k, grad_v = torch.zeros(k.shape), torch.zeros(v.shape)
        arrays = _flat(q, k, v, out, log_sums, grad_THD.contiguous(), grad_q, grad_k, grad_v)
        ctx.packed.run(packed_attention.differentiate, *arrays, *ctx.how, sizes=ctx.sizes)
        gradients = (x.to(q.dtype).transpose(0, 1) for x in (grad_q, grad_k, grad_v))
        grad_sink = None
        if sink_H is not None:  # its value is 0, so its slope is only what it takes from the others
            inner_TH = (grad_THD.float() * out.float()).sum(-1)
            grad_sink = -((sink_H.float() - log_sums).exp() * inner_TH).sum(0).to(sink_H.dtype)
        return (*gradients, grad_sink, None, None)


def _flat(*tensors: Tensor) -> list[np.ndarray]:
    return [x.detach().float().reshape(-1).numpy() for x in tensors]
