"""Predictions of lengths beside what came of them: how good they were lately.

Holds true: only what was predicted when a group was opened counts, before any of it was known.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Sequence
from math import exp
from statistics import correlation
from typing import NamedTuple

RESPONSES, FEWEST = 512, 32
"""Latest responses that metrics are of, and how many there must be."""
_KEEP = 1 - 1 / 256
"""Of the sums behind the explained variance, from response to response."""


class Prediction(NamedTuple):
    """Of a group's responses when it was opened, in logarithms of tokens."""

    is_seen: bool  # whether its prompt came before
    base: float  # for any prompt
    guess: float  # for this one
    low: float  # 80% will be from here ...
    high: float  # ... to here


class PredictionQuality:
    """Compares predictions with lengths."""

    def __init__(self) -> None:
        self._recent: deque[tuple[Prediction, float]] = deque(maxlen=RESPONSES)
        self._left = self._total = 0.0

    def add(self, prediction: Prediction, logs: Collection[float]) -> None:
        """A group has ended; `logs` are those of the lengths of its finished responses."""
        for y in logs:
            self._recent.append((prediction, y))
            self._left = _KEEP * self._left + (y - prediction.guess) ** 2
            self._total = _KEEP * self._total + (y - prediction.base) ** 2

    @property
    def explained_variance(self) -> float:
        """Share of the variance of log lengths that history explained lately, 0 to 1."""
        return max(0.0, 1 - self._left / self._total) if self._total else 0.0

    def metrics(self) -> dict[str, float]:
        """See docs/lengths.md; what is not known yet is left out."""
        found = {"lengths/explained_variance": self.explained_variance}
        recent, num = self._recent, len(self._recent)
        if num < FEWEST:
            return found
        covered = sum(exp(p.low) - 0.5 <= exp(y) <= exp(p.high) + 0.5 for p, y in recent)  # rounded
        seen = [(p.guess, y) for p, y in recent if p.is_seen]
        found |= {"lengths/coverage": covered / num, "lengths/seen_prompt_share": len(seen) / num}
        if len(seen) >= FEWEST:
            ranks = spearman(*zip(*seen, strict=True))
            found |= {} if ranks is None else {"lengths/rank_correlation": ranks}
        return found


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Rank correlation, equal values with their mean rank; None if all of one side are equal."""
    if min(a) == max(a) or min(b) == max(b):
        return None
    return correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(bisect_left(ordered, v) + bisect_right(ordered, v)) / 2 for v in values]
