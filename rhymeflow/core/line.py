"""A line fitted to pairs as they come, that notices when it is no longer true.

Holds true: what is kept are decayed sums, so memory is constant. Knows nothing of lengths.
"""

from __future__ import annotations

GROUPS, FEW = 96.0, 16.0
"""Pairs that a line is fitted to, and the last few that may contradict it."""
_SURPRISE = 3.0
"""Standard errors by which the mean of those few has to differ."""

_Sums = tuple[float, ...]
"""Decayed sums over pairs: 1, x, y, x x, x y, y y."""


class Line:
    """u = mean + slope (x - mean x), with the drift guard; begins with invented groups (x, u)."""

    def __init__(self, *groups: tuple[float, float]) -> None:
        terms = [_terms(x, y) for x, y in groups]
        self._long: _Sums = tuple(map(sum, zip(*terms, strict=True)))
        self._short = self._long
        self._solve()

    def at(self, x: float | None) -> float:
        """The prediction; None: of any prompt."""
        return self.mean if x is None else self.mean + self.slope * (x - self._x)

    def add(self, x: float, y: float) -> None:
        """One more group."""
        new = _terms(x, y)
        self._long = _added(self._long, new, GROUPS)
        self._short = _added(self._short, new, FEW)
        a, b = _fitted(self._short)
        num, sum_x, sum_y = self._short[:3]
        shift = sum_y / num - self.at(sum_x / num)
        is_new = shift**2 > _SURPRISE**2 * _left(self._short, a, b) / num
        if b < self.slope / 4 or is_new:
            self._long = self._short
        self._solve()

    def _solve(self) -> None:
        num, x, y, xx, *_ = self._long
        a, b = _fitted(self._long)
        self._x, self.mean, self.slope = x / num, y / num, 0.0
        if b > 0:
            error = num / (num - 2) * _left(self._long, a, b) / (xx - x * x / num)  # squared
            self.slope = min(1.0, max(0.0, b - error / b))
        self.left = _left(self._long, self.at(0.0), self.slope)
        """Mean square of what it does not explain."""


def _terms(x: float, y: float) -> _Sums:
    return 1.0, x, y, x * x, x * y, y * y


def _added(sums: _Sums, new: _Sums, groups: float) -> _Sums:
    return tuple((1 - 1 / groups) * a + b for a, b in zip(sums, new, strict=True))


def _fitted(sums: _Sums) -> tuple[float, float]:
    """The least squares of y on a + b x."""
    num, x, y, xx, xy, _ = sums
    spread = xx - x * x / num
    b = (xy - x * y / num) / spread if spread > 1e-9 * num else 0.0
    return (y - b * x) / num, b


def _left(sums: _Sums, a: float, b: float) -> float:
    """Mean square of y - a - b x."""
    num, x, y, xx, xy, yy = sums
    left = yy - 2 * a * y - 2 * b * xy + a * a * num + 2 * a * b * x + b * b * xx
    return max(0.0, left / num)
