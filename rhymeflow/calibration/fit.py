"""From timings to coefficients.

Holds true: fitted coefficients are not negative; what is minimised is the mean of the squared
relative errors, so that short iterations count as much as long ones. Knows nothing of where
timings come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

_KINKS = 128
"""Places of the kink that are tried, and again around the best of them."""


class DecodeTiming(NamedTuple):
    """One decode iteration of `n` trajectories with `kv_tokens` in the cache."""

    n: int
    kv_tokens: int
    seconds: float


class DecodeFit(NamedTuple):
    """Coefficients of an iteration, `k1 K + max(k2, k3 n + c) + k4`; see `core.cost`."""

    k1: float
    k2: float
    k3: float
    c: float
    k4: float

    def seconds(self, n: float, kv_tokens: float) -> float:
        """What an iteration takes by this fit."""
        return self.k1 * kv_tokens + max(self.k2, self.k3 * n + self.c) + self.k4


class LineFit(NamedTuple):
    """Seconds = `each` times amount + `fixed`."""

    each: float
    fixed: float

    def seconds(self, amount: float) -> float:
        """What `amount` takes by this fit."""
        return self.each * amount + self.fixed


class Errors(NamedTuple):
    """Relative errors of a fit, as shares of what was measured."""

    mean: float
    worst: float


def fit_decode(timings: Sequence[DecodeTiming]) -> DecodeFit:
    """Fit one iteration's cost.

    With the kink at m the floor is k2 = k3 m + c, so the whole is linear in (k1, k3, c): k1 K + k3
    max(n, m) + c. Kinks from 0 to the largest n are tried, then kinks between the neighbours of the
    best, and the one that fits best is taken. k4 cannot be separated from k2 and c together, and is
    0.
    """
    assert timings, "nothing was measured"
    n, kv_tokens, seconds = (np.array(column, float) for column in zip(*timings, strict=True))
    best, best_kink, best_loss = DecodeFit(0, 0, 0, 0, 0), 0.0, np.inf
    low, high = 0.0, float(n.max())
    for _ in range(2):
        kinks, step = np.linspace(low, high, _KINKS, retstep=True)
        for kink in map(float, kinks):
            columns = np.stack([kv_tokens, np.maximum(n, kink), np.ones_like(n)], axis=1)
            (k1, k3, c), loss = nonnegative(columns, seconds)
            if loss < best_loss * (1 - 1e-9):
                best_kink, best_loss = kink, loss
                best = DecodeFit(k1=k1, k2=k3 * kink + c, k3=k3, c=c, k4=0.0)
        low, high = max(low, best_kink - float(step)), min(high, best_kink + float(step))
    return best


def fit_line(amounts: Sequence[float], seconds: Sequence[float]) -> LineFit:
    """Fit what something costs by its amount, and in any case."""
    amount = np.array(amounts, float)
    columns = np.stack([amount, np.ones_like(amount)], axis=1)
    (each, fixed), _ = nonnegative(columns, np.array(seconds, float))
    return LineFit(each, fixed)


def nonnegative(columns: np.ndarray, seconds: np.ndarray) -> tuple[list[float], float]:
    """Coefficients, none below 0, of the columns [P, C] for seconds [P], and the loss.

    The best coefficients are the unbounded ones of those columns that they do not set to 0: with
    at most a handful of columns all choices can be tried.
    """
    assert (seconds > 0).all(), "a timing of 0"
    relative = columns / seconds[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0
    relative = relative / scale
    num_columns = columns.shape[1]
    best, best_loss = [0.0] * num_columns, 1.0
    for size in range(1, num_columns + 1):
        for chosen in combinations(range(num_columns), size):
            some = relative[:, chosen]
            found = np.linalg.lstsq(some, np.ones(len(some)), rcond=None)[0]
            loss = float(((some @ found - 1) ** 2).mean())
            if (found >= 0).all() and loss < best_loss * (1 - 1e-9):
                best_loss = loss
                best = [0.0] * num_columns
                for column, value in zip(chosen, found, strict=True):
                    best[column] = float(value / scale[column])
    return best, best_loss


def errors(predicted: Sequence[float], measured: Sequence[float]) -> Errors:
    """How far off predictions are."""
    shares = [abs(p - m) / m for p, m in zip(predicted, measured, strict=True)]
    return Errors(sum(shares) / len(shares), max(shares))


__all__ = [
    "DecodeFit",
    "DecodeTiming",
    "Errors",
    "LineFit",
    "errors",
    "fit_decode",
    "fit_line",
    "nonnegative",
]
