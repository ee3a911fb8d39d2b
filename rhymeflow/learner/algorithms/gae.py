"""Advantages of single tokens, of the rewards that follow them: PPO's, by a critic's values, with
the loss that trains the critic; and REINFORCE++'s (arXiv 2501.03262), with values of 0.

Sources: GAE (arXiv 1506.02438, equation 16); the clipped loss of values is that of OpenAI's
baselines, and of verl. What an environment observes is no action: advantages pass over it without a
discount, and it has no value, as in verl. The sequences of a response follow each other as if they
were one: later ones are of what an agent did after the tokens of earlier ones.
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
    reward_N: np.ndarray,
    penalties: Sequence[np.ndarray] | None,
    like: Sequence[np.ndarray],
    owner_S: np.ndarray,
) -> list[np.ndarray]:
    """Return the rewards of the tokens of S samples, shaped as those of `like`: that of a response
    is its last token's; `penalties` are taken from those of tokens. `owner_S`: whose response each
    sample is of (`sample.owners`)."""
    rewards = [-each for each in penalties or map(np.zeros_like, like)]
    lasts = np.flatnonzero(np.diff(owner_S, append=-1))
    for last, reward in zip(lasts, reward_N, strict=True):
        rewards[last][-1:] += reward
    return rewards


def estimates(
    rewards: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    config: LearnerConfig,
    owner_S: np.ndarray,
) -> Estimates:
    """Return what follows from the rewards and values of tokens, [R] of each of S samples."""
    lam, ends = config.lam if config.has_critic else 1.0, np.cumsum([*map(len, values)])
    of_responses = ends[:-1][np.diff(owner_S) > 0]
    parts = (np.split(np.concatenate(each), of_responses) for each in (rewards, values))
    rewards_of, values_of = parts
    pairs = zip(rewards_of, values_of, strict=True)
    flat = np.concatenate([generalized_advantages(*pair, config.gamma, lam) for pair in pairs])
    returns = np.split(flat + np.concatenate(values), ends[:-1])
    if config.scale_rewards == "tokens":
        flat = whitened(flat, np.ones_like(flat))
    if (most := config.advantage_clip) is not None:
        flat = flat.clip(-most, most)
    return Estimates([*values], returns, np.split(flat, ends[:-1]))


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
