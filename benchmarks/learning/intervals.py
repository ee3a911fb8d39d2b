"""Student's t intervals of few values, and what a difference of pairs could have shown.

Holds true: the unit is a run; values of one index belong together. Written out because the project
asks for no statistics package. Formulas: Abramowitz and Stegun, Handbook of Mathematical Functions,
26.7.3 and 26.7.4.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95
"""Of all intervals."""
POWER = 0.8
"""A difference counts as detectable if an interval would leave out 0 so often."""


def distribution(t: float, degrees: int) -> float:
    """Chance that Student's t with so many degrees of freedom (at least 1) is at most `t`."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(degrees // 2):
        total += term
        below = 2 * k + (3 if odd else 2)
        term *= cosine * cosine * (below - 1) / below
    inside = (angle + sine * total) * 2 / math.pi if odd else sine * total
    return (1 + inside) / 2


@functools.cache
def quantile(share: float, degrees: int) -> float:
    """The t below which Student's t stays with chance `share`, in [1/2, 1)."""
    assert 0.5 <= share < 1, share
    low, high = 0.0, 1.0
    while distribution(high, degrees) < share:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if distribution(middle, degrees) < share else (low, middle)
    return high


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its interval; `nan` where one value says nothing of width."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        """Lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Upper end."""
        return self.mean + self.half

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half:.3f}"


def interval(values: Sequence[float]) -> Interval:
    """The mean of at least one value, with its t interval at `LEVEL`."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, math.nan)
    spread = quantile((1 + LEVEL) / 2, len(values) - 1)
    return Interval(mean, spread * statistics.stdev(values) / math.sqrt(len(values)))


def detectable(differences: Sequence[float]) -> float:
    """The true mean difference that so many pairs, spread like these, would show at `POWER`.

    The usual approximation (t at half the rest of `LEVEL` + t at `POWER`) standard errors, which is
    a little low where there are very few pairs.
    """
    if len(differences) < 2:
        return math.nan
    degrees = len(differences) - 1
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return (quantile((1 + LEVEL) / 2, degrees) + quantile(POWER, degrees)) * error
