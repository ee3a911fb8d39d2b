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
from rhymeflow.utils.prefixes import common

MOST_PARTS = 16
"""Parts of a tree that threads compute side by side, each with a copy of the gradients by what all
have in common."""


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
        self._parts, self._owners, copied = self._branching(num_tokens)
        self._copied = torch.from_numpy(copied)
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

    def _branching(self, num_tokens: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
        """Return what can be done side by side. Sequences that share a token add to the same
        gradients; those that have only the beginning in common that all of their tree have do so
        to copies of it.

        Returns: the sequences of each part; in the order of `_places`, the rows that gradients are
        added to; and the row of each copy, which come after the row's own tokens."""
        places = [self._places[begin:][:length] for begin, length, _ in self._sequences_S3]
        firsts = np.array([each[0] for each in places])
        parts, owners, copied = [], self._places.copy(), [np.zeros(0, dtype=np.int64)]
        count = num_tokens
        for first in np.unique(firsts):
            tree = np.flatnonzero(firsts == first)
            trunk = min(common(places[tree[0]], places[n]) for n in tree)
            after = np.array([places[n][trunk] if len(places[n]) > trunk else -1 for n in tree])
            children = list(dict.fromkeys(after.tolist()))
            for number, some in enumerate(np.array_split(children, min(len(children), MOST_PARTS))):
                parts.append(tree[np.isin(after, some)])
                if number:  # the first adds to the tokens themselves
                    for begin in self._sequences_S3[parts[-1], 0]:
                        owners[begin : begin + trunk] = np.arange(count, count + trunk)
                    copied.append(places[tree[0]][:trunk])
                    count += trunk
        return parts, owners, np.concatenate(copied)

    def _split(self, num_kv_heads: int, num_threads: int) -> list[np.ndarray]:
        """Return the kernels' items, one array per thread: whole parts of a head, by equal work."""
        pieces = []
        for part in self._parts:
            rows_S3 = self._sequences_S3[part]
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

    def attended(self, *arrays: Any, sizes: tuple[int, int, int]) -> None:
        """Run `packed_attention.attend`."""
        self._run(packed_attention.attend, *arrays, sizes, places=(self._places,))

    def differentiated(
        self, *arrays: Any, keys: tuple[int, ...], sizes: tuple[int, int, int]
    ) -> tuple[Tensor, Tensor]:
        """Run `packed_attention.differentiate`; return the gradients by keys and values, of shape
        `keys`, [T, G, D]."""
        shape = keys[0] + len(self._copied), *keys[1:]
        grad_k, grad_v = torch.zeros(shape), torch.zeros(shape)
        first, how = arrays[:7], arrays[7:]
        self._run(
            packed_attention.differentiate,
            *(*first, *_flat(grad_k, grad_v), *how, sizes),
            places=(self._places, self._owners),
        )
        for each in (grad_k, grad_v):
            each[: keys[0]].index_add_(0, self._copied, each[keys[0] :])
        return grad_k[: keys[0]], grad_v[: keys[0]]

    def _run(self, kernel: Callable[..., None], *arrays: Any, places: tuple[Any, ...]) -> None:
        """Run a kernel on all items, one job per thread. The last of `arrays` are the sizes."""
        _, num_kv_heads, head_dim = arrays[-1]
        key = num_kv_heads, torch.get_num_threads()
        if key not in self._jobs:
            self._jobs[key] = self._split(*key)
        jobs = self._jobs[key]

        def call(items: np.ndarray) -> None:
            room = packed_attention.room(self._longest, head_dim)
            kernel(*arrays, items, *places, room)

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
        packed.attended(*arrays, *ctx.how, sizes=ctx.sizes)
        out = out_THD.to(q_HTD.dtype)
        ctx.save_for_backward(*rows, out, log_sums_TH, sink_H)
        return out

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sums, sink_H = ctx.saved_tensors
        grad_q = torch.empty(q.shape)
        arrays = _flat(q, k, v, out, log_sums, grad_THD.contiguous(), grad_q)
        grad_k, grad_v = ctx.packed.differentiated(*arrays, *ctx.how, keys=k.shape, sizes=ctx.sizes)
        gradients = (x.to(q.dtype).transpose(0, 1) for x in (grad_q, grad_k, grad_v))
        grad_sink = None
        if sink_H is not None:  # its value is 0, so its slope is only what it takes from the others
            inner_TH = (grad_THD.float() * out.float()).sum(-1)
            grad_sink = -((sink_H.float() - log_sums).exp() * inner_TH).sum(0).to(sink_H.dtype)
        return (*gradients, grad_sink, None, None)


def _flat(*tensors: Tensor) -> list[np.ndarray]:
    return [x.detach().float().reshape(-1).numpy() for x in tensors]
