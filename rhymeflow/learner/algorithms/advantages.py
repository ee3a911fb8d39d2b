"""Computes advantages from rewards: how much better a response did than others of its group.

The advantages of a group sum to 0 (up to rounding) whatever the scaling; a group whose rewards do
not differ (`core/spread.py`) has advantages of exactly 0.

Source: GRPO (arXiv 2402.03300, section 4.1.1); `batch` is the scaling of arXiv 2508.08221, section
4.1, `none` that of Dr. GRPO (arXiv 2503.20783, section 3.2), `decoupled_advantages` GDPO (arXiv
2601.05242). The numbers are those of TRL 1.16: the standard deviation with Bessel's correction,
plus 1e-4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rhymeflow.core.spread import STD_EPSILON, is_flat, normalized_sum


@dataclass(frozen=True)
class Advantages:
    """One advantage for each sample of a batch, in the order of the batch."""

    values: np.ndarray
    """float64 [N]."""
    frac_zero_std: float
    """Share of samples for which the standard deviation (of their group or the batch) is zero."""


def group_advantages(
    rewards: Sequence[float],
    groups: Sequence[int],
    scale_rewards: Literal["group", "batch", "none"],
) -> Advantages:
    """Return reward minus group mean, divided by the deviation that `scale_rewards` names, if any.

    `groups[i]` is the group of `rewards[i]`; groups may differ in size and come in any order. The
    advantage in a group of one is 0.
    """
    reward_N = np.asarray(rewards, dtype=np.float64)
    centred_N = np.empty_like(reward_N)
    std_N = np.empty_like(reward_N)
    for members in _members(groups):
        group = reward_N[members]
        is_equal = is_flat(group.tolist())
        # The mean of equal numbers may differ from them by rounding; set the advantage to 0.
        centred_N[members] = 0.0 if is_equal else group - group.mean()
        std_N[members] = 0.0 if is_equal else group.std(ddof=1)
    if scale_rewards == "batch":
        std_N[:] = 0.0 if is_flat(reward_N.tolist()) else reward_N.std(ddof=1)
    values_N = centred_N if scale_rewards == "none" else centred_N / (std_N + STD_EPSILON)
    return Advantages(values_N, float((std_N == 0.0).mean()))


def decoupled_advantages(
    components: Sequence[Mapping[str, float]], weights: Mapping[str, float], groups: Sequence[int]
) -> Advantages:
    """Return the weighted sum of the advantages of each reward, divided by the batch's deviation.

    `components[i]` has the rewards that applied to sample i, by name; a missing one adds nothing to
    the sample's sum and does not count in its group's mean.
    """
    sum_N = np.zeros(len(components))
    for members in _members(groups):
        sum_N[members] = normalized_sum([components[i] for i in members], weights)
    std = sum_N.std(ddof=1) if len(sum_N) > 1 else 0.0
    is_nonzero_N = sum_N != 0.0  # zeros stay exactly 0: the mean is 0 up to rounding
    values_N = np.where(is_nonzero_N, sum_N - sum_N.mean(), 0.0) / (std + STD_EPSILON)
    return Advantages(values_N, float(is_flat(sum_N.tolist())))


def _members(groups: Sequence[int]) -> list[np.ndarray]:
    _, group_N = np.unique(np.asarray(groups), return_inverse=True)
    return [np.flatnonzero(group_N == g) for g in range(int(group_N.max()) + 1)]
