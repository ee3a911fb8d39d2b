"""The metrics of one training step, under TRL's names where TRL has them.

Means per token are over the response tokens in the loss, in all optimizer steps of the batch."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rhymeflow.learner.packing import PackedRow
from rhymeflow.learner.sample import Sample, by_response, first_sequences

REDUCED = {"clip_ratio/low_min": min, "clip_ratio/high_max": max, "off_policy/max_ratio": max}
"""Metrics that are an extreme over micro-batches, not a mean."""
FROM_FIRST_PASS = "off_policy/mismatch_kl"
"""The metric that counts each token once, however often the batch is trained on."""


class Totals:
    """Sums over the micro-batches and optimizer steps of one batch."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names` are those of the sums that every micro-batch with a sample adds."""
        self._values: dict[str, list[Any]] = {name: [] for name in names}
        """Scalars on the device, or numbers."""
        self._counts: Counter[str] = Counter()
        self._losses: list[tuple[float, list[Any]]] = []
        """The scale and the losses of each optimizer step; on several ranks, this rank's."""
        self._grad_norms: list[float] = []

    def add(self, sums: Mapping[str, Tensor], row: PackedRow, *, is_first_pass: bool) -> None:
        """Add a micro-batch's sums; `is_first_pass`: the batch was not trained on before."""
        for name, value in sums.items():
            self._values.setdefault(name, []).append(value)
        tokens, computed = len(row.targets_R), len(row.tokens_T)
        self._counts.update(tokens=tokens, computed=computed, unshared=row.size_unshared)
        self._counts["first_pass"] += tokens if is_first_pass else 0

    def add_step(self, grad_norm: float, scale: float) -> None:
        """Count an optimizer step, whose loss is `scale` times the losses since the last step."""
        self._grad_norms.append(grad_norm)
        self._losses.append((scale, self._values["loss"]))
        self._values["loss"] = []

    def as_numbers(self) -> Totals:
        """Return a copy without tensors, for which the host waits once."""
        other = copy.copy(self)
        lists = [*self._values.values(), *(losses for _, losses in self._losses)]
        every = [value for values in lists for value in values]
        # Counts of a micro-batch's tokens are exact as float32, too.
        numbers = iter(torch.stack(every).tolist() if every else ())
        fetched = [[next(numbers) for _ in values] for values in lists]
        other._values = dict(zip(self._values, fetched, strict=False))
        scales = [scale for scale, _ in self._losses]
        other._losses = list(zip(scales, fetched[len(self._values) :], strict=True))
        return other

    @classmethod
    def merged(cls, parts: Sequence[Totals]) -> Totals:
        """Merge the totals of several ranks, which took the same optimizer steps."""
        merged = cls(())
        merged._grad_norms = parts[0]._grad_norms
        for part in parts:
            for name, values in part._values.items():
                merged._values.setdefault(name, []).extend(values)
            merged._counts.update(part._counts)
            merged._losses += part._losses  # `means` adds them up
        return merged

    def means(self) -> dict[str, float]:
        """Return loss and gradient norm per optimizer step, all others per token or as extremes; of
        numbers (`as_numbers`)."""
        steps, counts = max(len(self._grad_norms), 1), self._counts
        metrics = {}
        for name, values in self._values.items():
            if name in REDUCED:
                metrics[name] = REDUCED[name](values)
            else:
                tokens = counts["first_pass" if name == FROM_FIRST_PASS else "tokens"]
                metrics[name] = sum(values, 0.0) / max(tokens, 1)
        metrics["loss"] = sum(scale * sum(losses, 0.0) for scale, losses in self._losses) / steps
        metrics["grad_norm"] = sum(self._grad_norms) / steps
        metrics["packing/computed_share"] = counts["computed"] / max(counts["unshared"], 1)
        for name in ("clip_ratio/low_min", "clip_ratio/high_max", FROM_FIRST_PASS):
            metrics.setdefault(name, 0.0)
        metrics.setdefault("off_policy/max_ratio", 1.0)
        return metrics


def batch_metrics(batch: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics of a batch that depend on its samples alone, by response. The mean and
    standard deviation of a reward function are over the responses it applied to; without any there
    is no `reward`. If all responses were truncated, the `terminated_length` metrics are 0, as in
    TRL."""
    responses = first_sequences(batch)
    length_N = by_response(batch, [sample.num_sampled for sample in batch])
    is_whole_N = np.array([not sample.truncated for sample in responses])
    ended_N = length_N[is_whole_N] if is_whole_N.any() else np.zeros(1)
    metrics = {}
    if any(sample.components for sample in responses):
        reward_N = np.array([sample.reward for sample in responses])
        metrics = {"reward": float(reward_N.mean()), "reward_std": _std(reward_N)}
    for kind, values_N in (("length", length_N), ("terminated_length", ended_N)):
        metrics[f"completions/mean_{kind}"] = float(values_N.mean())
        metrics[f"completions/min_{kind}"] = float(values_N.min())
        metrics[f"completions/max_{kind}"] = float(values_N.max())
    metrics["completions/clipped_ratio"] = float((~is_whole_N).mean())
    if any(sample.observed for sample in batch) or len(responses) < len(batch):
        turns_N = by_response(batch, [sample.num_turns for sample in batch])
        metrics["turns/mean"] = float(turns_N.mean())
    return metrics | _by_function(responses)


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
    """Sample standard deviation (n - 1), as in TRL; 0 for a single value."""
    return float(values_N.std(ddof=1)) if len(values_N) > 1 else 0.0
