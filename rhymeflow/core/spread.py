"""Whether the rewards of a group differ: the test of the filter, the metric and the advantages.

Rewards that are equal up to rounding do not differ; such a group has no advantages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

STD_EPSILON = 1e-4  # added to a standard deviation before dividing, as in TRL

_ZERO, _ROUNDING = 1e-8, 1e-12
"""Deviations that count as 0: absolute, as in TRL (`torch.isclose`), and relative to the values."""


def is_flat(values: Sequence[float]) -> bool:
    """Whether all values are equal up to rounding."""
    return _deviation(values) <= max(_ZERO, _ROUNDING * max(map(abs, values), default=0.0))


def _deviation(values: Sequence[float]) -> float:
    """Standard deviation with Bessel's correction; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def normalized_sum(
    components: Sequence[Mapping[str, float]], weights: Mapping[str, float]
) -> list[float]:
    """Normalize each reward over the group and return each member's weighted sum (GDPO, arXiv
    2601.05242); all are 0 if they cancel out up to rounding.

    `components[i]` has the rewards that applied to member i, by name. A reward adds nothing to the
    sums of members that it did not apply to, and its mean and standard deviation leave them out."""
    total, largest = [0.0] * len(components), 0.0
    for name, weight in weights.items():
        members = [i for i, each in enumerate(components) if name in each]
        values = [components[i][name] for i in members]
        if is_flat(values):
            continue
        mean, scale = math.fsum(values) / len(values), weight / (_deviation(values) + STD_EPSILON)
        for i, value in zip(members, values, strict=True):
            total[i] += scale * (value - mean)
            largest = max(largest, abs(scale * (value - mean)))
    cancels = max(map(abs, total), default=0.0) <= _ROUNDING * largest
    return [0.0] * len(total) if cancels else total
