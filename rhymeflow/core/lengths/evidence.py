"""What predictions of lengths were worth, and how much to go by history because of it.

The logarithm of a length is predicted when its group is opened, as

    drift + mean + b * deviation

`deviation` is how far the prompt's earlier lengths were from the mean, shrunk by how few they were.
`drift` is what lengths of known prompts have changed in common since the run began; `b` is what
history is worth, by decayed least squares, over groups: members of one are no independent examples.

The drift guard: the slope of the last few groups is compared with the slope of the last few score.
If they differ by more than chance, in either direction, what the dozens said is forgotten. So
history that stops being true has no weight a few groups later, and regains it as soon when it is
true again. Likewise a common shift of several standard errors makes the drift be followed quickly
for a while.

Holds true: groups that are handed in together count as much as each other, whatever their order.
Knows no groups by name, no prompts, no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

LONG, SHORT = 160.0, 8.0
"""Groups over which history's worth is learned, and a change of it is looked for."""
_MEAN_GROUPS = 256.0
_VARIANCE_GROUPS = 128.0
_DRIFT, _QUICK_DRIFT = 1 / 128, 1 / 6
_SURPRISE = 3.0
"""Standard errors."""
_SKILL_RESPONSES, _SKILL_GROUPS = 128.0, 16.0
_ENOUGH = 6.0
"""Groups with history before skill is spoken of."""
_HOPE = 0.2
"""Share of the variance between groups that history leaves unexplained, until there is evidence."""
_LEAST_SHARE = 0.002
"""Of the variance of lengths; no variance is taken to be less."""


class Example(NamedTuple):
    """A group that is over; lengths as logarithms."""

    mean: float
    responses: int
    scatter: float
    """Sum of squares around the mean."""
    deviation: float | None
    """Of the prompt's history when the group was opened; None without any."""
    base: float
    """What was predicted for any prompt when it was opened."""
    guess: float
    """What was predicted for it."""


class Evidence:
    """Learns from groups that are over.

    Args:
        mean, variance: of logarithms of lengths, before anything is seen.
    """

    def __init__(self, mean: float, variance: float) -> None:
        self.mean, self.drift = mean, 0.0
        self.within = self.between = variance / 2
        self.beyond = _HOPE * self.between
        """Variances: within groups, between them, and of what history leaves unexplained there."""
        self.num_groups = 0
        self._mean_weight = 0.0
        self._scatter = _Decayed(_VARIANCE_GROUPS)  # squares within groups, degrees of freedom
        self._levels = _Decayed(_VARIANCE_GROUPS)  # squares of groups' distances from the mean, n
        self._sizes = _Decayed(_VARIANCE_GROUPS)  # sum of 1 / responses, n
        self._long, self._short = _Slope(LONG), _Slope(SHORT)
        self._errors = (0.0, 0.0, 0.0)  # of predictions lately: groups, sum, squares
        self._haste = 0.0
        self._left = self._total = self._known = 0.0

    @property
    def base(self) -> float:
        """What is predicted for a prompt without history."""
        return self.drift + self.mean

    @property
    def worth(self) -> float:
        """`b`: what a deviation in history counts for, 0 to 1.2; 1 until there is evidence.

        Shrunk by its own standard error (James and Stein): chance does not make history count.
        """
        if self._long.weight == 0:
            return 1.0
        slope, error = self._long.slope()
        return min(1.2, slope * max(0.0, 1 - (error / slope) ** 2)) if slope > 0 else 0.0

    @property
    def skill(self) -> float:
        """Share of the variance that predictions at opening explained lately, 0 to 1."""
        if self._known < _ENOUGH or self._total <= 0:
            return 0.0
        return min(1.0, max(0.0, 1 - self._left / self._total))

    def trust(self, count: float) -> float:
        """How much of a prompt's distance from the mean is believed, after so many responses."""
        return count / (count + self.within / self.between)

    def learn(self, examples: Sequence[Example]) -> None:
        """Take in groups that ended together."""
        if not examples:
            return
        self._judge(examples)
        known = [e for e in examples if e.deviation is not None]
        self._follow(known or examples, bool(known))
        self._weigh(known)
        self._centre(examples)
        self._vary(examples)
        self.num_groups += len(examples)

    def _judge(self, examples: Sequence[Example]) -> None:
        """Skill: what predictions left, and what there was to explain."""
        responses = sum(e.responses for e in examples)
        window = max(_SKILL_RESPONSES, _SKILL_GROUPS * responses / len(examples))
        keep = (1 - 1 / window) ** responses
        left = sum(e.scatter + e.responses * (e.mean - e.guess) ** 2 for e in examples)
        total = sum(e.scatter + e.responses * (e.mean - e.base) ** 2 for e in examples)
        self._left, self._total = keep * self._left + left, keep * self._total + total
        known = sum(e.deviation is not None for e in examples)
        self._known = (1 - 1 / _SKILL_GROUPS) ** len(examples) * self._known + known

    def _follow(self, examples: Sequence[Example], known: bool) -> None:
        """Move the drift, quickly after a surprise."""
        count, worth = len(examples), self.worth
        errors = [e.mean - self.base - worth * (e.deviation or 0.0) for e in examples]
        keep = (1 - 1 / SHORT) ** count
        weight, total, squares = (keep * value for value in self._errors)
        weight, total = weight + count, total + sum(errors)
        squares += sum(error * error for error in errors)
        self._errors = (weight, total, squares)
        mean = total / weight
        foreseen = (self.beyond if known else self.between) + self.within / examples[0].responses
        variance = max(foreseen, squares / weight - mean * mean)
        self._haste *= keep
        if weight > 3 and mean * mean * weight > _SURPRISE**2 * variance:
            self._haste, self._errors = 1.0, (0.0, 0.0, 0.0)
        rate = _DRIFT + self._haste * (_QUICK_DRIFT - _DRIFT)
        if known:
            self.drift += (1 - (1 - rate) ** count) * sum(errors) / count
        elif self._haste:
            self._mean_weight = min(self._mean_weight, SHORT)

    def _weigh(self, known: Sequence[Example]) -> None:
        """Learn `b`; forget what was learned if the last few groups say something else."""
        if not known:
            return
        pairs = [(e.deviation or 0.0, e.mean - self.base) for e in known]
        if self._long.weight == 0:  # history is taken at its word, but on the word of two groups
            squares = sum(x * x for x, _ in pairs) / len(pairs)
            for slope in (self._long, self._short):
                slope.begin(2.0, squares, self.beyond + self.within / known[0].responses)
        for slope in (self._long, self._short):
            slope.add(pairs)
        if self._short.contradicts(self._long):
            self._long.become(self._short)

    def _centre(self, examples: Sequence[Example]) -> None:
        """The mean of all prompts, the drift left out."""
        count = len(examples)
        self._mean_weight = self._mean_weight * (1 - 1 / _MEAN_GROUPS) ** count + count
        error = sum(e.mean - self.base for e in examples) / count
        self.mean += count / self._mean_weight * error

    def _vary(self, examples: Sequence[Example]) -> None:
        """Variances within groups, between them, and of what history does not explain."""
        count = len(examples)
        self._scatter.add(
            count, sum(e.scatter for e in examples), sum(e.responses - 1 for e in examples)
        )
        self._levels.add(count, sum((e.mean - self.base) ** 2 for e in examples), count)
        self._sizes.add(count, sum(1 / e.responses for e in examples), count)
        levels = self._levels.mean(default=self.between + self.within)
        within = self._scatter.mean(default=levels / 2)
        least = _LEAST_SHARE * (levels + within) + 1e-6
        noise = within * self._sizes.mean(default=1.0)
        self.within = max(least, within)
        self.between = max(least, levels - noise)
        self.beyond = _HOPE * self.between
        if self._long.weight:
            left = self._long.left(self.worth)
            self.beyond = max(least, min(self.between, left - noise))


class _Decayed:
    """A mean over about so many groups."""

    def __init__(self, groups: float) -> None:
        self._keep = 1 - 1 / groups
        self._sum = self._weight = 0.0

    def add(self, groups: int, total: float, weight: float) -> None:
        keep = self._keep**groups
        self._sum, self._weight = keep * self._sum + total, keep * self._weight + weight

    def mean(self, default: float) -> float:
        return self._sum / self._weight if self._weight else default


class _Slope:
    """Least squares through the origin over about so many pairs."""

    def __init__(self, groups: float) -> None:
        self._keep = 1 - 1 / groups
        self.weight = self.xx = self.xy = self.yy = 0.0

    def begin(self, weight: float, squares: float, noise: float) -> None:
        """As if so many pairs had said 1."""
        self.weight = weight
        self.xx = self.xy = weight * squares
        self.yy = weight * (squares + noise)

    def add(self, pairs: Sequence[tuple[float, float]]) -> None:
        self._scale(self._keep ** len(pairs))
        self.weight += len(pairs)
        self.xx += sum(x * x for x, _ in pairs)
        self.xy += sum(x * y for x, y in pairs)
        self.yy += sum(y * y for _, y in pairs)

    def become(self, other: _Slope) -> None:
        """Forget everything but what the other knows."""
        self.weight, self.xx = other.weight, other.xx
        self.xy, self.yy = other.xy, other.yy

    def contradicts(self, other: _Slope) -> bool:
        """Whether this slope differs from the other by more than chance.

        Chance is what the better of the two leaves: after a change the one or the other fits badly.
        """
        if self.weight < 3 or self.xx <= 0:
            return False
        here, there = self.slope()[0], other.slope()[0]
        chance = min(other.left(there), self.left(here) * self.weight / (self.weight - 2))
        return (here - there) ** 2 * self.xx > _SURPRISE**2 * chance

    def left(self, slope: float) -> float:
        """Mean square that this slope leaves."""
        return max(0.0, self.yy - 2 * slope * self.xy + slope * slope * self.xx) / self.weight

    def slope(self) -> tuple[float, float]:
        """The slope and its standard error."""
        if self.xx <= 0:
            return 0.0, 1.0
        slope = self.xy / self.xx
        return slope, sqrt(self.left(slope) / max(1.0, self.weight - 1) * self.weight / self.xx)

    def _scale(self, keep: float) -> None:
        self.weight, self.xx = keep * self.weight, keep * self.xx
        self.xy, self.yy = keep * self.xy, keep * self.yy
