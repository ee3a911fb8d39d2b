"""What is known of a group from those of its members that have finished, and those that have not.

Logarithms of the lengths in a group are its own level plus what differs from member to member, both
taken as normal. Who finishes first is short, so the finished alone mislead: those not finished are
counted as longer than a floor (a Tobit likelihood), and the level is where the posterior is
highest. Pure arithmetic.
"""

from __future__ import annotations

from math import erfc, exp, inf, pi, sqrt

_ROOT_HALF, _ROOT_2_BY_PI = sqrt(0.5), sqrt(2 / pi)
_FAR = 8.0
_STEPS = 12


def level(
    prior: float,
    variance: float,
    noise: float,
    total: float,
    count: int,
    unfinished: int = 0,
    floor: float = -inf,
) -> tuple[float, float]:
    """Return the level of a group, and its variance; all in logarithms of tokens.

    Never falls when `floor` rises, and rises at most as fast as it.

    Args:
        prior, variance: what is known of the level beforehand.
        noise: the variance of members around the level.
        total, count: sum and number of the finished.
        unfinished: how many others are longer than `floor`.
        floor: see there.
    """
    precision = 1 / variance + count / noise
    centre = (prior / variance + total / noise) / precision
    if not unfinished or floor == -inf:
        return centre, 1 / precision
    scale = sqrt(noise)
    found, slope = centre, precision
    for _ in range(_STEPS):  # Newton; the function is convex and falls, so it comes from one side
        z = (floor - found) / scale
        hazard = _hazard(z)
        slope = precision + unfinished * hazard * max(hazard - z, 0.0) / noise
        step = (precision * (centre - found) + unfinished * hazard / scale) / slope
        found += step
        if step < 1e-6:
            break
    return found, 1 / slope


def _hazard(z: float) -> float:
    """Density over tail of the standard normal distribution."""
    if z < -_FAR:
        return 0.0
    if z > _FAR:
        return z + 1 / z - 2 / z**3
    return _ROOT_2_BY_PI * exp(-z * z / 2) / erfc(z * _ROOT_HALF)
