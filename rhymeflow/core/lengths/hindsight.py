"""Predictions made when groups were opened, beside what came of them.

Holds true: of the last `RESPONSES` that finished, whatever the order. Counts only, predicts
nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

RESPONSES = 512
_FEWEST = 32


@dataclass(frozen=True, slots=True)
class Calibration:
    """How good predictions of lengths were lately; None where too little is known."""

    skill: float
    """Share of the variance of log lengths that predictions at opening explained."""
    rank_correlation: float | None
    """Spearman's, of responses whose prompt had a history: prediction at opening against truth."""
    coverage: float | None
    """Share of all responses that ended within the 80% interval predicted at opening."""
    known: float | None
    """Share of responses whose prompt had a history."""

    def metrics(self) -> dict[str, float]:
        """Under the names that metrics have; what is not known is left out."""
        values = {
            "lengths/rank_correlation": self.rank_correlation,
            "lengths/coverage": self.coverage,
            "lengths/skill": self.skill,
            "lengths/known": self.known,
        }
        return {name: value for name, value in values.items() if value is not None}


class Hindsight:
    """Remembers the last few hundred."""

    def __init__(self) -> None:
        self._seen: deque[tuple[bool, float, int, bool]] = deque(maxlen=RESPONSES)

    def add(self, known: bool, guess: float, length: int, covered: bool) -> None:
        """A response finished; `guess` is anything that grows with the predicted length."""
        self._seen.append((known, guess, length, covered))

    def calibration(self, skill: float) -> Calibration:
        """Sum up."""
        seen = self._seen
        if len(seen) < _FEWEST:
            return Calibration(skill, None, None, None)
        pairs = [(guess, length) for known, guess, length, _ in seen if known]
        ranks = None
        if len(pairs) >= _FEWEST:
            ranks = spearman([a for a, _ in pairs], [b for _, b in pairs])
        covered = sum(covered for *_, covered in seen) / len(seen)
        return Calibration(skill, ranks, covered, len(pairs) / len(seen))


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Rank correlation, equal values with their mean rank; None if all of one side are equal."""
    x, y = _ranks(a), _ranks(b)
    middle = (len(x) + 1) / 2
    xx = sum((u - middle) ** 2 for u in x)
    yy = sum((v - middle) ** 2 for v in y)
    if not xx or not yy:
        return None
    return sum((u - middle) * (v - middle) for u, v in zip(x, y, strict=True)) / sqrt(xx * yy)


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    first = 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and values[order[last + 1]] == values[order[first]]:
            last += 1
        for i in range(first, last + 1):
            ranks[order[i]] = (first + last) / 2 + 1
        first = last + 1
    return ranks
