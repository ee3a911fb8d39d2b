"""How far recent predictions were off, as a distribution that says how far the next may be.

Nothing is assumed of its shape: a few dozen points stand for what was seen, closer together towards
the long end, where most of the tokens are. What is longer than anything seen goes on as a
power law, as steep as the upper end of what was (Hill's estimator). Knows nothing of prompts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import exp, log, sqrt
from statistics import NormalDist

_POINTS = 48
_SHARES = tuple(1 - (1 - i / _POINTS) ** 1.5 for i in range(_POINTS + 1))
_TOP = 0.05


class Residuals:
    """Weighted points in logarithms of tokens, ascending.

    Args:
        seen: differences between the truth and what was predicted, in any order.
        expected: what to expect while little is seen, ascending.
        trust: responses that `expected` counts for at first; for none when `enough` are seen.
        enough: see there.
    """

    def __init__(
        self,
        seen: Sequence[float],
        expected: Sequence[float] = (),
        trust: float = 0.0,
        enough: int = 64,
    ) -> None:
        ordered = sorted(seen)
        weight = trust * max(0.0, 1 - len(ordered) / enough)
        pairs = _binned(ordered)
        if weight > 0 and expected:
            pairs += [(value, weight / len(expected)) for value in expected]
            pairs.sort()
        assert pairs, "no residual at all"
        self.tail = _steepness(ordered) if len(ordered) >= 8 else 0.5
        self.points = [value for value, _ in pairs]
        self.weights = [weight for _, weight in pairs]
        self.above = [0.0] * (len(pairs) + 1)
        """Weight of the points from here on."""
        for i in range(len(pairs) - 1, -1, -1):
            self.above[i] = self.above[i + 1] + self.weights[i]

    def mean(self, location: float, scale: float, floor: float, longest: float) -> float:
        """Mean length, cut at `longest`, given that its logarithm is above `floor`."""
        start = bisect_right(self.points, (floor - location) / scale)
        if start == len(self.points):
            return min(longest, exp(floor + scale * self.tail))
        total = sum(
            weight * min(longest, exp(location + scale * point))
            for point, weight in zip(self.points[start:], self.weights[start:], strict=True)
        )
        return total / self.above[start]

    def quantile(self, q: float, floor: float) -> float:
        """The q-quantile of the residuals above `floor`."""
        start = bisect_right(self.points, floor)
        if start == len(self.points):
            return floor + self.tail * -log(max(1 - q, 1e-9))
        # The point where the weight from there on, half of its own left out, is this.
        rest = (1 - q) * self.above[start]
        low, high = start, len(self.points) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._from(middle) >= rest:
                low = middle
            else:
                high = middle - 1
        a = self._from(low)
        if low == len(self.points) - 1 or a <= rest:
            return self.points[low]
        b = self._from(low + 1)
        share = (a - rest) / (a - b)
        return self.points[low] + share * (self.points[low + 1] - self.points[low])

    def _from(self, index: int) -> float:
        return self.above[index] - self.weights[index] / 2


def _binned(ordered: list[float]) -> list[tuple[float, float]]:
    """Points of equal means of lengths, with the number that each stands for."""
    count = len(ordered)
    if count <= _POINTS:
        return [(value, 1.0) for value in ordered]
    pairs = []
    first = 0
    for share in _SHARES[1:]:
        last = max(round(share * count), first + 1) if first < count else count
        if last > first:
            part = ordered[first:last]
            top = part[-1]
            mean = sum(exp(value - top) for value in part) / len(part)
            pairs.append((top + log(mean), float(len(part))))
            first = last
    return pairs


def _steepness(ordered: list[float]) -> float:
    """Mean distance of the highest few from the one below them."""
    num = max(4, round(_TOP * len(ordered)))
    base = ordered[-num - 1]
    return max(0.01, sum(value - base for value in ordered[-num:]) / num)


def normal_points(num: int = 32) -> list[float]:
    """Points of equal weight of the standard normal distribution, ascending."""
    normal = NormalDist()
    return [normal.inv_cdf((i + 0.5) / num) for i in range(num)]


def exponential_points(mean: float, num: int = 32) -> list[float]:
    """Logarithms of points of equal weight of an exponential distribution with this mean."""
    points = [-log(1 - (i + 0.5) / num) for i in range(num)]
    scale = mean * num / sum(points)
    return [log(scale * point) for point in points]


def spread(points: Sequence[float]) -> float:
    """Standard deviation."""
    mean = sum(points) / len(points)
    return sqrt(sum((point - mean) ** 2 for point in points) / len(points))
