"""What is foretold of a group's responses, from what was known at one moment.

A prediction is a product: what lengths are like in general, times what the prompt's history says
(as far as history was worth something lately), times what the group's own members say, times what
recent predictions of the same kind were off by. There are three kinds: a prompt never seen, one
with a history, a group of which members have finished.

What a member is expected to reach is worked out as if all unfinished members of its group had as
many tokens as it: in most schedules they start together.

Holds true: never changes; all logarithms are of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, log, sqrt
from typing import NamedTuple

from rhymeflow.core.lengths import siblings
from rhymeflow.core.lengths.correction import Correction
from rhymeflow.core.lengths.residuals import Residuals

_LOW, _HIGH = 0.1, 0.9
_STEP = 1.6


class Past(NamedTuple):
    """A prompt's history, as it was when a group of it was opened."""

    level: float
    """Mean logarithm of the lengths, common drift left out."""
    trust: float
    """How much of its distance from the mean of all prompts is believed, 0 to 1."""


class Standing(NamedTuple):
    """What predictions know of a group."""

    past: Past | None
    """None: the prompt has no history."""
    finished: int
    total: float
    """Sum of the logarithms of the finished lengths."""


NOBODY = Standing(None, 0, 0.0)
"""A group of a prompt never seen."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """Predictions made from the same knowledge."""

    longest: int
    size: int
    """Members of a group."""
    drift: float
    average: float
    """Of logarithms, over all prompts, common drift left out."""
    worth: float
    """What a prompt's distance from the average counts for."""
    within: float
    """Variance of logarithms within groups."""
    between: float
    """Of the levels of groups whose prompt was never seen, around what is predicted."""
    beyond: float
    """Of those with a history."""
    unseen: Residuals
    known: Residuals
    siblings: Residuals
    """In standard deviations."""
    correction: Correction

    @property
    def base(self) -> float:
        """The guess for a prompt never seen."""
        return self.drift + self.average

    def guess(self, past: Past | None) -> float:
        """The logarithm of the length, at opening."""
        if past is None:
            return self.base
        return self.base + self.worth * past.trust * (past.level - self.average)

    def interval(self, past: Past | None) -> tuple[float, float]:
        """Logarithms between which 80% of the lengths will be, at opening."""
        guess = self.guess(past)
        residuals = self.unseen if past is None else self.known
        return guess + residuals.quantile(_LOW, -inf), guess + residuals.quantile(_HIGH, -inf)

    def mean(self, standing: Standing, made: int, *, corrected: bool = True) -> float:
        """Mean tokens of a response that has `made` (less than `longest`) and goes on."""
        floor = log(made) if made > 0 else -inf
        residuals, centre, scale = self._residuals(standing, floor)
        value = residuals.mean(centre, scale, floor, self.longest)
        if corrected and made > 0:
            value = made + (value - made) * self._factor(standing, floor)
        return min(max(value, made + 1.0), float(self.longest))

    def quantile(self, standing: Standing, q: float, made: int) -> float:
        """The q-quantile of its length."""
        floor = log(made) if made > 0 else -inf
        residuals, centre, scale = self._residuals(standing, floor)
        off = residuals.quantile(q, (floor - centre) / scale)
        value = exp(min(centre + scale * off, log(self.longest)))
        if made > 0:
            value = made + (value - made) * self._factor(standing, floor)
        return min(max(value, made + 1.0), float(self.longest))

    def distance(self, standing: Standing, floor: float) -> float:
        """How far `floor` is from the guess at opening, in standard deviations."""
        variance = self.between if standing.past is None else self.beyond
        return (floor - self.guess(standing.past)) / sqrt(self.within + variance)

    def _factor(self, standing: Standing, floor: float) -> float:
        return self.correction.factor(standing.finished, self.size, self.distance(standing, floor))

    def _residuals(self, standing: Standing, floor: float) -> tuple[Residuals, float, float]:
        """The distribution of residuals, and the centre and the scale that go with it."""
        variance = self.between if standing.past is None else self.beyond
        centre, rest = siblings.level(
            self.guess(standing.past),
            variance,
            self.within,
            standing.total,
            standing.finished,
            max(0, self.size - standing.finished - 1),
            floor,
        )
        if standing.finished:
            return self.siblings, centre, sqrt(self.within + rest)
        scale = sqrt((self.within + rest) / (self.within + variance))
        return self.unseen if standing.past is None else self.known, centre, scale


def marks(longest: int) -> list[int]:
    """Tokens at which expectations are worked out, ascending from 0; in between they are lines."""
    found = [0, 1] if longest > 1 else [0]
    while longest > 2 and found[-1] * _STEP < longest - 1:
        found.append(max(found[-1] + 1, round(found[-1] * _STEP)))
    return [*found, longest]
