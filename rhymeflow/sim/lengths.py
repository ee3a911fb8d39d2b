"""Distributions of response lengths, as a table over normal scores.

A length is a function of a standard normal number z, its score: the length that is as far up the
distribution as z is up the normal one. Prompts then correlate by their scores (a Gaussian copula),
whatever the distribution: z = sqrt(rho) z_prompt + sqrt(1 - rho) z_response. Between the points of
the table lengths are interpolated.

Holds true: the mean after the cut-off is the configured one; `rho` is such that the prompt explains
the configured share of the variance of the lengths themselves, not of their scores. Samples
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, sqrt
from statistics import NormalDist

import numpy as np

from rhymeflow.config import WorkloadConfig
from rhymeflow.errors import UserError

_NORMAL = NormalDist()
_REACH = 6.0
_PER_UNIT = 64
_SCORES = np.linspace(-_REACH, _REACH, int(2 * _REACH * _PER_UNIT) + 1)
_WEIGHTS = np.exp(-(_SCORES**2) / 2)
_WEIGHTS /= _WEIGHTS.sum()


class Lengths:
    """Lengths 1 .. `longest` of a configured distribution.

    Raises:
        UserError: no scale of the distribution has the mean that is asked for.
    """

    def __init__(self, config: WorkloadConfig, longest: int) -> None:
        mean = longest / 4 if config.mean_length is None else config.mean_length
        table = _scaled(config.sigma * _SCORES, mean, longest)
        self.rho = _rho(table, config.prompt_variance_share)
        self._table: list[float] = table.tolist()

    def at(self, score: float) -> int:
        """The length at a normal score."""
        position = (min(max(score, -_REACH), _REACH) + _REACH) * _PER_UNIT
        index = min(int(position), len(self._table) - 2)
        low, high = self._table[index], self._table[index + 1]
        return max(1, round(low + (position - index) * (high - low)))


# -- fitting the table -----------------------------------------------------------------------------


def _scaled(shape: np.ndarray, mean: float, longest: int) -> np.ndarray:
    """Lengths at the scores, scaled and cut off so that they have this mean."""

    def lengths(scale: float) -> np.ndarray:
        return np.exp(np.clip(shape + scale, 0.0, log(longest)))

    low, high = -float(shape.max()), log(longest) - float(shape.min())
    if not 1 < mean < longest:
        raise UserError(
            f"simulation.workload.mean_length: {mean:g} is not the mean of responses of 1 to "
            f"{longest} tokens (rollout.max_completion_length)"
        )
    return lengths(_bisect(lambda scale: float(lengths(scale) @ _WEIGHTS) >= mean, low, high))


def _rho(table: np.ndarray, share: float) -> float:
    """The correlation of scores at which the prompt explains this share of the variance."""
    if share in (0.0, 1.0):
        return share
    mean = float(table @ _WEIGHTS)
    variance = float(table**2 @ _WEIGHTS) - mean**2
    coarse, weights = _SCORES[::8], _WEIGHTS[::8] / _WEIGHTS[::8].sum()

    def explains(rho: float) -> bool:
        scores = sqrt(rho) * coarse[:, None] + sqrt(1 - rho) * coarse[None, :]
        of_prompt = np.interp(scores, _SCORES, table) @ weights
        return float(of_prompt**2 @ weights) - mean**2 >= share * variance

    return _bisect(explains, 0.0, 1.0)


def _bisect(reached: Callable[[float], bool], low: float, high: float) -> float:
    """The least x in the interval at which a condition that never becomes false again holds."""
    for _ in range(50):
        middle = (low + high) / 2
        if reached(middle):
            high = middle
        else:
            low = middle
    return high
