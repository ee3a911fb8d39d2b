"""The numbers of one training step, under TRL's names where TRL has them.

Token means are over all response tokens in the loss of all optimizer steps of the batch. Knows
nothing of torch's graph: what is added is detached already.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from rhymeflow.learner.sample import Sample


class Totals:
    """Sums over tokens while a batch is trained on; read once at the end."""

    def __init__(self, names: Sequence[str]) -> None:
        self._sums: dict[str, list[Tensor | float]] = {name: [] for name in names}
        self._losses: list[float] = []
        """Of optimizer steps."""
        self._tokens = 0
        self._computed = self._full = 0
        self._mismatch: list[Tensor | float] = []
        self._max_ratio: list[Tensor | float] = []
        self._clips: list[tuple[Tensor | float, Tensor | float]] = []
        self._mismatch_tokens = 0
        self._grad_norms: list[float] = []

    def add(self, sums: dict[str, Tensor], num_tokens: int) -> None:
        """Add one micro-batch's `losses.diagnose`."""
        for name, value in sums.items():
            self._sums[name].append(value)
        self._tokens += num_tokens

    def add_row(self, computed: int, full: int) -> None:
        """Add a row's tokens, and those it would have without common beginnings of responses."""
        self._computed += computed
        self._full += full

    def add_mismatch(self, kl: Tensor, max_ratio: Tensor, num_tokens: int) -> None:
        """Add one micro-batch's `losses.mismatch`."""
        self._mismatch.append(kl)
        self._max_ratio.append(max_ratio)
        self._mismatch_tokens += num_tokens

    def add_clips(self, low: Tensor, high: Tensor) -> None:
        """Add one micro-batch's `losses.clip_extremes`."""
        self._clips.append((low, high))

    def add_step(self, grad_norm: float, scale: float) -> None:
        """Count an optimizer step, whose loss is what was added since the last times `scale`."""
        self._grad_norms.append(grad_norm)
        self._losses.append(scale * sum(map(float, self._sums["loss"]), 0.0))
        self._sums["loss"] = []

    def collapsed(self) -> Totals:
        """The same as numbers, to be sent to another process."""
        other = Totals(tuple(self._sums))
        other._sums = {name: [sum(map(float, kept), 0.0)] for name, kept in self._sums.items()}
        other._tokens, other._mismatch_tokens = self._tokens, self._mismatch_tokens
        other._computed, other._full = self._computed, self._full
        other._mismatch = [float(value) for value in self._mismatch]
        other._max_ratio = [float(value) for value in self._max_ratio]
        other._clips = [(float(low), float(high)) for low, high in self._clips]
        other._grad_norms, other._losses = self._grad_norms, self._losses
        return other

    @classmethod
    def merged(cls, parts: Sequence[Totals]) -> Totals:
        """Of parts of one batch, which took their optimizer steps together."""
        first = parts[0]
        whole = cls(tuple(first._sums))
        whole._grad_norms = first._grad_norms
        for part in parts:
            for name, kept in part._sums.items():
                whole._sums[name] += kept
            whole._mismatch += part._mismatch
            whole._max_ratio += part._max_ratio
            whole._clips += part._clips
            whole._losses += part._losses
            whole._tokens += part._tokens
            whole._computed += part._computed
            whole._full += part._full
            whole._mismatch_tokens += part._mismatch_tokens
        return whole

    def means(self) -> dict[str, float]:
        """Loss and gradient norm per optimizer step, the rest per token."""
        sums = {name: sum(map(float, kept), 0.0) for name, kept in self._sums.items()}
        steps, tokens = max(len(self._grad_norms), 1), max(self._tokens, 1)
        metrics = {name: value / tokens for name, value in sums.items()}
        metrics["loss"] = sum(self._losses) / steps
        metrics["packing/computed_share"] = self._computed / max(self._full, 1)
        metrics["clip_ratio/low_min"] = min((float(low) for low, _ in self._clips), default=0.0)
        metrics["clip_ratio/high_max"] = max((float(high) for _, high in self._clips), default=0.0)
        metrics["grad_norm"] = sum(self._grad_norms) / steps
        kl = sum(float(value) for value in self._mismatch)
        metrics["off_policy/mismatch_kl"] = kl / max(self._mismatch_tokens, 1)
        metrics["off_policy/max_ratio"] = max((float(x) for x in self._max_ratio), default=1.0)
        return metrics


def batch_metrics(batch: Sequence[Sample]) -> dict[str, float]:
    """What can be said of a batch without the policy.

    The mean and standard deviation of a reward function are over the responses it applied to. Where
    all responses were cut, the lengths of those that ended are 0, as in TRL.
    """
    reward_N = np.array([sample.reward for sample in batch])
    length_N = np.array([sample.num_sampled for sample in batch])
    ended_N = np.array([sample.num_sampled for sample in batch if not sample.truncated] or [0])
    return {
        "reward": float(reward_N.mean()),
        "reward_std": _std(reward_N),
        "completions/mean_length": float(length_N.mean()),
        "completions/min_length": float(length_N.min()),
        "completions/max_length": float(length_N.max()),
        "completions/clipped_ratio": float(np.mean([sample.truncated for sample in batch])),
        "completions/mean_terminated_length": float(ended_N.mean()),
        "completions/min_terminated_length": float(ended_N.min()),
        "completions/max_terminated_length": float(ended_N.max()),
        **_by_function(batch),
        **_turns(batch),
    }


def _turns(batch: Sequence[Sample]) -> dict[str, float]:
    if not any(sample.observed for sample in batch):
        return {}
    return {"turns/mean": float(np.mean([sample.num_turns for sample in batch]))}


def _by_function(batch: Sequence[Sample]) -> dict[str, float]:
    rewards: dict[str, list[float]] = {}
    for sample in batch:
        for name, value in sample.components.items():
            rewards.setdefault(name, []).append(value)
    metrics = {}
    for name, values in rewards.items():
        values_N = np.array(values)
        metrics[f"rewards/{name}/mean"] = float(values_N.mean())
        metrics[f"rewards/{name}/std"] = _std(values_N)
    return metrics


def _std(values_N: np.ndarray) -> float:
    """As TRL does: of a sample (n - 1); 0 for a single value."""
    return float(values_N.std(ddof=1)) if len(values_N) > 1 else 0.0


__all__ = ["Totals", "batch_metrics"]
