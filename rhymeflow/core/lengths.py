"""How long responses will be, predicted from the lengths of those that have ended.

All in y = log(tokens). A member of a group is the group's level and a deviation of its own:

    y = u + e,    u ~ Normal(prior, V),    e ~ Normal(0, W)

*Prompts.* Of each prompt a mean of y is kept, an epoch counting half as much as the next; shrunk
by how few responses w it is of, it is x. The slope b of u on x is learned from the last groups
(decayed least squares) and shrunk by its standard error: useless history gets b = 0.

    prior = mean u                       for a prompt never seen
    prior = mean u + b (x - mean x)      else;  x = (w level + k mean u) / (w + k),  k = W / V

*Drift guard.* If the last few groups, fitted alone, give less than a quarter of b, or are off the
line by more than chance, their line replaces it: a history that stops being true, or a shift common
to all prompts, is noticed within some dozen groups.

*Siblings.* Y is the sum of n finished members. Short ones finish first, so m others count too, each
with its mean above what all of them have, the floor (a censored normal, fitted by EM):

    u = (prior / V + (Y + m E[y | y > floor, u]) / W) / (1 / V + (n + m) / W)

*Shape.* None is assumed: predictions are of exp(u + s z), s^2 = W + 1 / (1 / V + n / W), where z
has the distribution that (y - prior) / sqrt(W + V) had lately.

Holds true: expectations are in (generated, longest] and never fall as `generated` grows; questions
change nothing, nor does what is said twice or of a group that is not open; groups that end between
two questions may do so in any order; memory is bounded. Knows no clock, no tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from math import erfc, exp, inf, log, pi, sqrt
from statistics import NormalDist, fmean
from typing import Any

from rhymeflow.core.line import GROUPS, Line
from rhymeflow.core.prediction_quality import Prediction, PredictionQuality
from rhymeflow.core.types import GroupId, TrajectoryId

MAX_PROMPTS = 100_000
"""Prompts remembered. Beyond them, a new one takes the place of the one that was trained on longest
ago if that did not come in the last epoch, and is not remembered otherwise: of data with more
prompts so many are known, where forgetting the oldest would forget each just before it returns."""
_EPOCH = 0.5
_RESIDUALS, _POINTS = 1024, 128
"""Responses that say how lengths are distributed, and points that stand for them."""
_LEAST = 1e-4
"""Lower bound of a variance."""
_EM_STEPS = 8


class LengthPredictor:
    """Predicts lengths by prompt and by group; what strategies see is `LengthPrediction`.

    Args:
        longest: tokens at which a response ends whatever it says.
        group_size: members of a group.
        generated: tokens that a trajectory has so far.
    """

    def __init__(
        self, longest: int, group_size: int, generated: Callable[[TrajectoryId], int]
    ) -> None:
        self.longest, self.group_size, self.generated = longest, group_size, generated
        self.quality = PredictionQuality()
        self._open: dict[GroupId, _Group] = {}
        self._ended: dict[GroupId, _Group] = {}
        self._prompts: dict[int, tuple[int, float, float]] = {}
        """Epoch, and decayed sums over responses: how many, y. The latest is last."""
        # Before anything has ended: lognormal, with a mean of a quarter of the longest.
        self._within, self._squares, self._freedom = 0.5, 0.5, 1.0
        start = log(longest / 4) - 0.5
        self._unseen = Line(*((0.0, start + d) for d in (-1, -0.1, 0.1, 1)))
        self._seen: Line | None = None
        normal = (NormalDist().inv_cdf((i + 0.5) / _POINTS) for i in range(_POINTS))
        self._residuals = deque(normal, maxlen=_RESIDUALS)
        self._points = list(self._residuals)
        self._expected: dict[tuple[GroupId, int], float] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "generated"}

    def open(self, group: GroupId, prompt: int, epoch: int) -> None:
        """A group of this prompt (row number) was requested."""
        if group in self._open:
            return
        self._learn()
        x = self._history(prompt)
        opened = self._open[group] = _Group(prompt, epoch, x)
        guess, scale = self._level(opened)
        low, high = (guess + scale * self._residual(q) for q in (0.1, 0.9))
        opened.prediction = Prediction(x is not None, self._line(x).mean, guess, low, high)

    def finished(self, trajectory: TrajectoryId, length: int) -> None:
        """A response of an open group is complete, and was not cut short."""
        group = self._open.get(trajectory.group)
        if group is not None:
            group.logs.setdefault(trajectory.member, log(min(max(length, 1), self.longest)))

    def close(self, group: GroupId) -> None:
        """The group has ended: no more will be asked about it."""
        ended = self._open.pop(group, None)
        if ended is not None and ended.logs:
            self._ended[group] = ended

    @property
    def explained_variance(self) -> float:
        """Share of the variance of log lengths that history explained lately, 0 to 1."""
        self._learn()
        return self.quality.explained_variance

    def expected(self, group: GroupId, generated: int = 0) -> float:
        """Mean tokens, when complete, of a member of this group that has `generated`."""
        self._learn()
        found = self._open.get(group, _NOBODY)
        if generated > 0:
            return self._mean(found, min(generated, self.longest))
        key = group, len(found.logs)  # asked again and again
        if key not in self._expected:
            self._expected[key] = self._mean(found, 0)
        return self._expected[key]

    def remaining(self, trajectory: TrajectoryId) -> float:
        """Tokens that a trajectory is expected to need still, at least 1."""
        generated = self.generated(trajectory)
        return max(1.0, self.expected(trajectory.group, generated) - generated)

    def quantile(self, group: GroupId, q: float) -> float:
        """The q-quantile of the lengths of a group's members, none of which has begun."""
        self._learn()
        level, scale = self._level(self._open.get(group, _NOBODY))
        return min(max(exp(level + scale * self._residual(q)), 1.0), float(self.longest))

    def _line(self, x: float | None) -> Line:
        return self._unseen if x is None or self._seen is None else self._seen

    def _prior(self, group: _Group) -> tuple[float, float]:
        """Mean and variance of a group's level by its prompt."""
        line = self._line(group.x)
        return line.at(group.x), max(line.left - self._within / self.group_size, _LEAST)

    def _level(self, group: _Group, floor: float = -inf, others: int = 0) -> tuple[float, float]:
        """`u`, if so many others are above the floor; and `s`."""
        (prior, variance), within = self._prior(group), self._within
        total = prior / variance + sum(group.logs.values()) / within
        precision = 1 / variance + len(group.logs) / within
        level, scale = total / precision, sqrt(within + 1 / precision)
        if others and floor > level - 4 * sqrt(within):  # else they say nothing
            share = others / within
            for _ in range(_EM_STEPS):
                above = mean_above(floor, level, sqrt(within))
                level = (total + share * above) / (precision + share)
        return level, scale

    def _mean(self, group: _Group, generated: int) -> float:
        floor, longest = log(generated) if generated else -inf, float(self.longest)
        others = max(0, self.group_size - len(group.logs) - 1)
        level, scale = self._level(group, floor, others)
        first = bisect_right(self._points, (floor - level) / scale)
        above = [min(longest, exp(level + scale * z)) for z in self._points[first:]]
        mean = fmean(above) if above else generated * exp(scale / 4)
        return min(max(mean, generated + 1.0), longest)

    def _residual(self, q: float) -> float:
        """The q-quantile of `z`."""
        return self._points[min(int(q * _POINTS), _POINTS - 1)]

    def _history(self, prompt: int) -> float | None:
        """`x` of a prompt; None: it was never seen."""
        if prompt not in self._prompts:
            return None
        _, weight, total = self._prompts[prompt]
        mean, variance = self._prior(_NOBODY)
        if self._seen is None:  # at first history is trusted
            d, e = sqrt(variance), sqrt(variance / 5)
            self._seen = Line(*((mean + x, mean + x + y) for x in (-d, d) for y in (-e, e)))
        doubt = self._within / variance
        return (total + doubt * mean) / (weight + doubt)

    def _learn(self) -> None:
        """Learn from the groups that ended since the last query."""
        if not self._ended:
            return
        groups = [self._ended[group] for group in sorted(self._ended)]
        self._ended.clear()
        self._expected.clear()
        whole = [group for group in groups if 2 * len(group.logs) >= self.group_size]
        for group in whole:
            self._fit(group)
        for group in whole:
            prior, variance = self._prior(group)
            scale = sqrt(self._within + variance)
            self._residuals.extend((y - prior) / scale for y in group.logs.values())
        ordered, num = sorted(self._residuals), len(self._residuals)
        cuts = [i * num // _POINTS for i in range(_POINTS + 1)]
        self._points = [fmean(ordered[a:b]) for a, b in pairwise(cuts)]
        for group in groups:
            self._remember(group)
            self.quality.add(group.prediction, group.logs.values())

    def _fit(self, group: _Group) -> None:
        logs = group.logs.values()
        mean = fmean(logs)
        self._unseen.add(0.0, mean)
        if group.x is not None and self._seen is not None:
            self._seen.add(group.x, mean)
        keep = 1 - 1 / GROUPS
        self._squares = keep * self._squares + sum((y - mean) ** 2 for y in logs)
        self._freedom = keep * self._freedom + len(logs) - 1
        self._within = max(self._squares / self._freedom, _LEAST)

    def _remember(self, group: _Group) -> None:
        """Members that did not finish were longer than the others."""
        logs, level = group.logs.values(), fmean(group.logs.values())
        if len(logs) < self.group_size:
            level, _ = self._level(group, max(logs), self.group_size - len(logs))
        if group.prompt not in self._prompts and len(self._prompts) >= MAX_PROMPTS:
            oldest = next(iter(self._prompts))
            if self._prompts[oldest][0] >= group.epoch - 1:
                return
            del self._prompts[oldest]
        epoch, weight, total = self._prompts.pop(group.prompt, (group.epoch, 0.0, 0.0))
        keep = _EPOCH ** max(0, group.epoch - epoch)
        weight, total = keep * weight + len(logs), keep * total + level * len(logs)
        self._prompts[group.prompt] = max(epoch, group.epoch), weight, total


@dataclass(slots=True)
class _Group:
    """A group that has not ended."""

    prompt: int
    epoch: int
    x: float | None
    prediction: Prediction = field(default=Prediction(False, 0.0, 0.0, 0.0, 0.0))
    """These two are of when it was opened."""
    logs: dict[int, float] = field(default_factory=dict)
    """Of the lengths of the members that have finished."""


_NOBODY = _Group(-1, 0, None)
"""A group of a prompt never seen."""


def mean_above(floor: float, mean: float, deviation: float) -> float:
    """Mean of a normal distribution's values above a floor."""
    z = (floor - mean) / deviation
    if z > 30:
        return floor + deviation / z
    return mean + deviation * sqrt(2 / pi) * exp(-z * z / 2) / erfc(z * sqrt(0.5))
