"""Attention of one engine iteration on a CPU, by the compiled kernel.

The row is in the order of the spans and nothing in it is padded. With more than one thread of
torch's the spans are dealt out to as many threads; results do not depend on how many.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rhymeflow.cpu import attention, threads
from rhymeflow.cpu.tiles import ROWS
from rhymeflow.engine.native.cache import CacheSpan, SizeClass
from rhymeflow.models.attention import Attention

DTYPES = (torch.float32, torch.bfloat16)
"""Of keys and values."""

_SMALL = 50_000
"""Products of a row and a cached token worth a thread of their own."""


def serves(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernel takes keys and values of this kind."""
    return device.type == "cpu" and dtype in DTYPES and head_dim % ROWS == 0


class CpuAttention:
    """Makes the attention of each iteration; compiles the kernel, or loads it."""

    def __init__(self, dtype: torch.dtype, head_dim: int) -> None:
        self._rooms: list[tuple[np.ndarray, ...]] = []
        self._longest = 0
        self._head_dim = head_dim
        panel = attention.PANEL
        size_class = SizeClass(panel, torch.zeros(1, 2, 1, 1, panel, head_dim, dtype=dtype))
        row_1TD = torch.zeros(1, 1, head_dim, dtype=dtype)
        once = self.over([CacheSpan(size_class.add(1), 0, 1)])
        once.attend(0, row_1TD, row_1TD, row_1TD, 1.0)

    def over(self, spans: list[CacheSpan]) -> _Iteration:
        """The attention of an iteration whose row is these spans, one after another."""
        size_classes: dict[SizeClass, list[int]] = {}
        for i, span in enumerate(spans):
            size_classes.setdefault(span.slot.size_class, []).append(i)
        rows_S5, parents = _described(spans)
        size_S = rows_S5[:, 3] * (rows_S5[:, 2] + rows_S5[:, 3])
        most = min(torch.get_num_threads(), 1 + int(size_S.sum()) // _SMALL)
        calls = [
            (size_class, _flat(size_class.kv), rows_S5[members][part])
            for size_class, members in size_classes.items()
            for part in _dealt(size_S[members], most)
        ]
        longest = max(size_class.capacity for size_class in size_classes)
        return _Iteration(calls, parents, self._working_memory(longest, most))

    def _working_memory(self, longest: int, num_threads: int) -> list[tuple[np.ndarray, ...]]:
        if longest > self._longest:
            self._rooms, self._longest = [], longest
        while len(self._rooms) < num_threads:
            self._rooms.append(attention.scratch(self._longest, self._head_dim))
        return self._rooms[:num_threads]


class _Iteration(Attention):
    """The attention of one iteration, in which no slot moves.

    A call is a size class, its keys and values, flat, and the spans of it that are computed. Those
    of one of `rooms` go one after another.
    """

    def __init__(
        self,
        calls: list[tuple[SizeClass, np.ndarray, np.ndarray]],
        parents: np.ndarray,
        rooms: list[tuple[np.ndarray, ...]],
    ) -> None:
        self.holds = calls[0][0].shape
        self._end = sum(int(rows_S5[:, 3].sum()) for *_, rows_S5 in calls)
        self._calls, self._parents, self._rooms = calls, parents, rooms

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scale: float
    ) -> Tensor:
        """See `models.attention.Attention`; returns [T, H, D]."""
        heads, tokens, dim = q_HTD.shape
        out_THD = torch.empty(tokens, heads, dim)
        if self._end < tokens:
            out_THD[self._end :] = 0
        sizes, count = (heads, k_GTD.shape[0], dim), len(self._rooms)
        q, out = _flat(q_HTD.transpose(0, 1).float()), _flat(out_THD)
        k, v = _flat(k_GTD.transpose(0, 1)), _flat(v_GTD.transpose(0, 1))

        def several(i: int) -> None:
            for size_class, kv, rows_S5 in self._calls[i::count]:
                of_layer, of_values, *_ = size_class.kv.stride()
                begin = (layer * of_layer, layer * of_layer + of_values)
                attention.attend(
                    q, k, v, kv, out, np.float32(scale), begin, size_class.capacity, sizes,
                    rows_S5, self._parents, self._rooms[i],
                )  # fmt: skip

        threads.run(several, range(count), torch.get_num_threads() if count > 1 else 1)
        return out_THD.to(q_HTD.dtype)


def _flat(x: Tensor) -> np.ndarray:
    """All elements in a row; bfloat16 as its bits."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy().reshape(-1)


def _described(spans: list[CacheSpan]) -> tuple[np.ndarray, np.ndarray]:
    """Spans and trees as `attention.attend` takes them."""
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


def _dealt(size_S: np.ndarray, count: int) -> Iterator[slice]:
    """At most `count` pieces of about equal size."""
    upto_S = size_S.cumsum()
    cuts = np.searchsorted(upto_S, upto_S[-1] * np.arange(1, count) / count) + 1
    for first, last in zip([0, *cuts], [*cuts, len(size_S)], strict=True):
        if first < last:
            yield slice(first, last)
