"""Advantages of single tokens, of the rewards that follow them: PPO's, by a critic's values, with
the loss that trains the critic; and REINFORCE++'s (arXiv 2501.03262), with values of 0.

Sources: GAE (arXiv 1506.02438, equation 16); the clipped loss of values is that of OpenAI's
baselines, and of verl. What an environment observes is no action: advantages pass over it without a
discount, and it has no value, as in verl.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from rhymeflow.config import LearnerConfig
from rhymeflow.learner.algorithms.advantages import whitened


@dataclass(frozen=True)
class Estimates:
    """For each sample of a batch, of its sampled tokens in the loss: float64 [R]."""

    values: list[np.ndarray]
    """The critic's, before the batch's first optimizer step."""
    returns: list[np.ndarray]
    """What the critic learns: advantages, before whitening, plus values."""
    advantages: list[np.ndarray]

    def metrics(self) -> dict[str, float]:
        """Return the mean value, and the share of the returns' variance that values explain."""
        value_T, return_T = np.concatenate(self.values), np.concatenate(self.returns)
        variance = float(return_T.var()) if len(return_T) else 0.0
        rest = float((return_T - value_T).var()) if variance else 0.0
        return {
            "value/mean": float(value_T.mean()) if len(value_T) else 0.0,
            "value/explained_variance": 1.0 - rest / variance if variance else 0.0,
        }


def token_rewards(
    reward_N: np.ndarray, penalties: Sequence[np.ndarray] | None, like: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return the rewards of tokens, shaped as those of `like`: a sample's is its last token's;
    `penalties` are taken from those of tokens."""
    rewards = [-each for each in penalties or map(np.zeros_like, like)]
    for reward_R, reward in zip(rewards, reward_N, strict=True):
        reward_R[-1:] += reward
    return rewards


def estimates(
    rewards: Sequence[np.ndarray], values: Sequence[np.ndarray], config: LearnerConfig
) -> Estimates:
    """Return what follows from the rewards and values of tokens, [R] of each sample."""
    pairs, lam = zip(rewards, values, strict=True), config.lam if config.has_critic else 1.0
    found = [generalized_advantages(*pair, config.gamma, lam) for pair in pairs]
    returns = [each + value_R for each, value_R in zip(found, values, strict=True)]
    flat = np.concatenate(found)
    if config.scale_rewards == "tokens":
        flat = whitened(flat, np.ones_like(flat))
    if (most := config.advantage_clip) is not None:
        flat = flat.clip(-most, most)
    return Estimates([*values], returns, np.split(flat, np.cumsum([*map(len, found)])[:-1]))


def generalized_advantages(
    reward_R: np.ndarray, value_R: np.ndarray, gamma: float, lam: float
) -> np.ndarray:
    """Return the advantages of a response's sampled tokens, float64 [R]."""
    delta_R = reward_R - value_R
    delta_R[:-1] += gamma * value_R[1:]
    backwards = accumulate(delta_R[::-1].tolist(), lambda later, delta: delta + gamma * lam * later)
    return np.array([*backwards], dtype=np.float64)[::-1]


def value_losses(
    value_R: Tensor, old_R: Tensor, return_R: Tensor, config: LearnerConfig
) -> tuple[Tensor, Tensor]:
    """Return each token's loss, and whether its value is clipped so that it has no gradient."""
    loss_R = (value_R - return_R).square()
    if (most := config.cliprange_value) is None:
        return 0.5 * loss_R, torch.zeros_like(loss_R, dtype=torch.bool)
    clipped_R = (value_R.clamp(old_R - most, old_R + most) - return_R).square()
    return 0.5 * torch.max(loss_R, clipped_R), clipped_R > loss_R
