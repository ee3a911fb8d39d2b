"""Attention of one engine iteration on a CPU, by the compiled kernel.

The packed row holds the spans in order, without padding. The spans are divided among as many
threads as torch uses; results do not depend on how many."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rhymeflow.cpu import attention, threads
from rhymeflow.cpu.tiles import ROWS
from rhymeflow.engine.native.cache import CacheSpan, SizeClass
from rhymeflow.models.attention import Attention, Reach, Weighing

DTYPES = (torch.float32, torch.bfloat16)  # supported dtypes of keys and values

_PAIRS_PER_THREAD = 50_000  # pairs of a query and a key that justify one more thread


def serves(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether the kernel supports these keys and values."""
    return device.type == "cpu" and dtype in DTYPES and head_dim % ROWS == 0


class CpuAttention:
    """Builds the attention of each iteration; its constructor compiles or loads the kernel."""

    def __init__(self, dtype: torch.dtype, head_dim: int) -> None:
        self._scratch: list[tuple[np.ndarray, ...]] = []
        self._longest = 0
        self._head_dim = head_dim
        panel = attention.PANEL
        size_class = SizeClass(
            panel, torch.zeros(1, 2, 1, 1, panel, head_dim, dtype=dtype), Reach()
        )
        row_1TD = torch.zeros(1, 1, head_dim, dtype=dtype)
        warm_up = self.over([CacheSpan(size_class.add(1), 0, 1)])
        warm_up.attend(0, row_1TD, row_1TD, row_1TD, Weighing(1.0))

    def over(self, spans: list[CacheSpan]) -> _Iteration:
        """Return the attention of an iteration whose packed row is these spans, in order."""
        size_classes: dict[SizeClass, list[int]] = {}
        for i, span in enumerate(spans):
            size_classes.setdefault(span.slot.size_class, []).append(i)
        rows_S5, parents = _encoded(spans)
        cached_S, new_S = rows_S5[:, 2], rows_S5[:, 3]
        pairs_S = new_S * (cached_S + new_S)
        num_threads = min(torch.get_num_threads(), 1 + int(pairs_S.sum()) // _PAIRS_PER_THREAD)
        calls = [
            (size_class, _flat(size_class.kv), rows_S5[members][part])
            for size_class, members in size_classes.items()
            for part in _split(pairs_S[members], num_threads)
        ]
        longest = max(size_class.capacity for size_class in size_classes)
        return _Iteration(calls, parents, self._working_memory(longest, num_threads))

    def _working_memory(self, longest: int, num_threads: int) -> list[tuple[np.ndarray, ...]]:
        if longest > self._longest:
            self._scratch, self._longest = [], longest
        while len(self._scratch) < num_threads:
            self._scratch.append(attention.scratch(self._longest, self._head_dim))
        return self._scratch[:num_threads]


class _Iteration(Attention):
    """The attention of one iteration, in which no slot moves. Each of `calls` is a size class, its
    flat keys and values, and the spans to compute; each of `scratch` is one thread's working
    memory."""

    def __init__(
        self,
        calls: list[tuple[SizeClass, np.ndarray, np.ndarray]],
        parents: np.ndarray,
        scratch: list[tuple[np.ndarray, ...]],
    ) -> None:
        self.cache_shape = calls[0][0].shape
        self._num_new = sum(int(rows_S5[:, 3].sum()) for *_, rows_S5 in calls)
        self._calls, self._parents, self._scratch = calls, parents, scratch

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTE: Tensor, weighing: Weighing
    ) -> Tensor:
        """See `models.attention.Attention`; returns [T, H, D]."""
        heads, tokens, dim = q_HTD.shape
        out_THD = torch.empty(tokens, heads, dim)
        if self._num_new < tokens:
            out_THD[self._num_new :] = 0  # rows of padding
        sizes, num_threads = (heads, k_GTD.shape[0], dim), len(self._scratch)
        q, out = _flat(q_HTD.transpose(0, 1).float()), _flat(out_THD)
        sinks = None if weighing.sink_H is None else weighing.sink_H.detach().float().numpy()
        limits = attention.limits(*weighing.reach, weighing.cap, sinks, heads)
        k, v = _flat(k_GTD.transpose(0, 1)), _flat(v_GTE.transpose(0, 1))

        def run_thread(i: int) -> None:
            for size_class, kv, rows_S5 in self._calls[i::num_threads]:
                layer_stride, values_stride, *_ = size_class.kv.stride()
                starts = (layer * layer_stride, layer * layer_stride + values_stride)
                attention.attend(
                    q, k, v, kv, out, np.float32(weighing.scale), *limits, starts,
                    size_class.capacity, sizes, rows_S5, self._parents, self._scratch[i],
                )  # fmt: skip

        pool_size = torch.get_num_threads() if num_threads > 1 else 1
        threads.run(run_thread, range(num_threads), pool_size)
        return out_THD.to(q_HTD.dtype)


def _flat(x: Tensor) -> np.ndarray:
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy().reshape(-1)


def _encoded(spans: list[CacheSpan]) -> tuple[np.ndarray, np.ndarray]:
    """Return `spans` and `parents` as `cpu.attention.attend` takes them."""
    parents: list[int] = []
    rows, start = [], 0
    for span in spans:
        tree = -1
        if span.parents:
            tree = len(parents)
            parents += [len(span.parents), *span.parents]
        rows.append((start, span.slot.index, span.cached, span.num_new, tree))
        start += span.num_new
    return np.array(rows, np.int64), np.array(parents or [0], np.int64)


def _split(size_S: np.ndarray, count: int) -> Iterator[slice]:
    """Split into at most `count` slices of about equal total size."""
    upto_S = size_S.cumsum()
    cuts = np.searchsorted(upto_S, upto_S[-1] * np.arange(1, count) / count) + 1
    for first, last in zip([0, *cuts], [*cuts, len(size_S)], strict=True):
        if first < last:
            yield slice(first, last)
