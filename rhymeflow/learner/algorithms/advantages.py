"""Computes advantages from rewards: how much better a response did than others of its group.

The advantages of a group sum to 0 (up to rounding) whatever the scaling, where the group's mean is
subtracted; a group whose rewards do not differ (`core/spread.py`) then has advantages of exactly 0,
unless tokens are whitened. `learner.advantage` names an estimator, or a function of a user.

Source: GRPO (arXiv 2402.03300, section 4.1.1); `batch` is the scaling of arXiv 2508.08221, section
4.1, `none` that of Dr. GRPO (arXiv 2503.20783, section 3.2), `decoupled_advantages` GDPO (arXiv
2601.05242). The numbers are those of TRL 1.16: the standard deviation with Bessel's correction,
plus 1e-4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from rhymeflow.core.spread import STD_EPSILON, is_flat, normalized_sum
from rhymeflow.errors import UserError
from rhymeflow.utils.user_modules import named_or_own
from rhymeflow.utils.user_values import described

if TYPE_CHECKING:
    from rhymeflow.config import LearnerConfig

Estimator = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Of a group's rewards and lengths, [G] each: its advantages before scaling, [G]."""


def group_mean(reward_G: np.ndarray, _: np.ndarray) -> np.ndarray:
    """Reward minus the group's mean: GRPO."""
    # The mean of equal numbers may differ from them by rounding; set the advantage to 0.
    return np.zeros_like(reward_G) if is_flat(reward_G.tolist()) else reward_G - reward_G.mean()


def leave_one_out(reward_G: np.ndarray, length_G: np.ndarray) -> np.ndarray:
    """Reward minus the mean of the group's others: RLOO (arXiv 2402.14740)."""
    return group_mean(reward_G, length_G) * (len(reward_G) / max(len(reward_G) - 1, 1))


def length_weighted(reward_G: np.ndarray, length_G: np.ndarray) -> np.ndarray:
    """Reward minus the group's mean by tokens, nearly the baseline of least variance: OPO (arXiv
    2505.23585)."""
    if is_flat(reward_G.tolist()) or not length_G.any():
        return np.zeros_like(reward_G)
    return reward_G - (reward_G * length_G).sum() / length_G.sum()


def reward_itself(reward_G: np.ndarray, _: np.ndarray) -> np.ndarray:
    """No baseline: REINFORCE++ (arXiv 2501.03262). With `scale_rewards: tokens` each token's is of
    the rewards that follow it, discounted by `gamma`."""
    return reward_G.copy()


def best_of_group(reward_G: np.ndarray, _: np.ndarray) -> np.ndarray:
    """The best response's lead over the second, 0 for the others: pass@k (arXiv 2503.19595)."""
    advantage_G = np.zeros_like(reward_G)
    if len(reward_G) > 1:
        second, best = reward_G.argsort(kind="stable")[-2:]
        advantage_G[best] = reward_G[best] - reward_G[second]
    return advantage_G


def generalized(reward_G: np.ndarray, _: np.ndarray) -> np.ndarray:
    """Each token's own, by a critic, of the reward itself: GAE (arXiv 1506.02438), with `gamma` and
    `lam`."""
    return reward_G.copy()


ESTIMATORS: Mapping[str, Estimator] = {
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "length_weighted": length_weighted,
    "reward": reward_itself,
    "best_of_group": best_of_group,
    "gae": generalized,
}


@cache
def estimator_of(name: str) -> Estimator:
    """Return `learner.advantage`. Raises `UserError` if there is no such estimator."""
    return named_or_own("learner.advantage", name, ESTIMATORS, "rewards, lengths")


@dataclass(frozen=True)
class Advantages:
    """One advantage for each sample of a batch, in the order of the batch."""

    values: np.ndarray
    """float64 [N]."""
    frac_zero_std: float
    """Share of samples for which the standard deviation (of their group or the batch) is zero."""
    of_tokens: list[np.ndarray] | None = None
    """With a critic, which takes the place of `values`: float64 [R] of each sample's tokens."""
    kl: float | None = None  # mean of a token's KL from the reference, if rewards were less it


def batch_advantages(
    rewards: Sequence[float] | np.ndarray,
    groups: Sequence[int],
    lengths: Sequence[int],
    config: LearnerConfig,
    components: Sequence[Mapping[str, float]] = (),
    weights: Mapping[str, float] | None = None,
) -> Advantages:
    """Return advantages as the configuration says. `lengths` are tokens in the loss; `components`
    and `weights` are for `decoupled_advantages`."""
    if config.multi_objective_aggregation == "normalize_then_sum":
        found = decoupled_advantages(components, weights or {}, groups)
    else:
        estimator = estimator_of(config.advantage)
        found = group_advantages(rewards, groups, config.scale_rewards, estimator, lengths)
    if (most := config.advantage_clip) is None:
        return found
    return replace(found, values=found.values.clip(-most, most))


def shaped_rewards(
    rewards: Sequence[float], lengths: Sequence[int], config: LearnerConfig, max_length: int
) -> np.ndarray:
    """Return the rewards by `learner.reward_clip` and `learner.overlong_buffer` (DAPO, arXiv
    2503.14476, section 3.4), float64 [N]. `lengths` are of whole responses."""
    reward_N = np.asarray(rewards, dtype=np.float64)
    if (most := config.reward_clip) is not None:
        reward_N = reward_N.clip(-most, most)
    if buffer := config.overlong_buffer:
        excess_N = np.asarray(lengths) - (max_length - buffer)
        reward_N = reward_N - config.overlong_penalty * (excess_N / buffer).clip(0.0, 1.0)
    return reward_N


def group_advantages(
    rewards: Sequence[float] | np.ndarray,
    groups: Sequence[int],
    scale_rewards: Literal["group", "batch", "none", "tokens"],
    estimator: Estimator = group_mean,
    lengths: Sequence[int] | None = None,
) -> Advantages:
    """Return what `estimator` says of each group, by default reward minus group mean, divided by
    the deviation that `scale_rewards` names, if any.

    `groups[i]` is the group of `rewards[i]`; groups may differ in size and come in any order. The
    advantage in a group of one is 0. `lengths`: tokens of each response, by default 1.
    """
    reward_N = np.asarray(rewards, dtype=np.float64)
    length_N = np.ones(len(reward_N)) if lengths is None else np.asarray(lengths, dtype=np.float64)
    centred_N = np.empty_like(reward_N)
    std_N = np.empty_like(reward_N)
    for members in _members(groups):
        group = reward_N[members]
        where = f"learner.advantage: {getattr(estimator, '__name__', estimator)}"
        try:
            found_G = np.asarray(estimator(group, length_N[members]), dtype=np.float64)
        except Exception as error:
            raise UserError(f"{where} raised {described(error)}") from error
        if found_G.shape != group.shape or not np.isfinite(found_G).all():
            raise UserError(
                f"{where} returned {found_G.tolist()} for {len(group)} rewards; give one finite "
                "number for each"
            )
        centred_N[members] = found_G
        std_N[members] = 0.0 if is_flat(group.tolist()) else group.std(ddof=1)
    if scale_rewards == "batch":
        std_N[:] = 0.0 if is_flat(reward_N.tolist()) else reward_N.std(ddof=1)
    share = float((std_N == 0.0).mean())
    if scale_rewards == "tokens":
        return Advantages(whitened(centred_N, length_N), share)
    if scale_rewards == "none":
        return Advantages(centred_N, share)
    # Where rewards do not differ nothing divides them: what is not 0 then has no baseline.
    values_N = centred_N / np.where(std_N == 0.0, 1.0, std_N + STD_EPSILON)
    return Advantages(values_N, share)


def whitened(advantage_N: np.ndarray, length_N: np.ndarray) -> np.ndarray:
    """Return the advantages with mean 0 and standard deviation 1 over tokens, as in verl."""
    tokens = length_N.sum()
    centred_N = advantage_N - (advantage_N * length_N).sum() / max(tokens, 1.0)
    variance = (centred_N**2 * length_N).sum() / max(tokens - 1.0, 1.0)
    return centred_N / np.sqrt(variance + 1e-8)


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
