"""How long responses will be: decayed means of the lengths that have ended, by prompt and by group.

Means are of log(tokens). A prompt's earlier responses (an epoch counts half as much as the next)
have a weight from 0 to 1: as much as they explained of recent groups. Finished members of a group
are averaged with them. The spread is that of the latest responses, of whatever shape.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, log, sqrt
from statistics import NormalDist, correlation, fmean
from typing import Any

from rhymeflow.core.types import GroupId, TrajectoryId

MAX_PROMPTS = 100_000
"""Prompts remembered. Beyond them, a new one replaces the one trained on longest ago, but only if
that did not come in the last epoch: else each would be forgotten before it returns."""
_LEAST = 1e-4
"""Variances are no smaller: everything may have one length."""
RESPONSES, FEWEST = 512, 32
"""Latest responses that the rank correlation is of, and how many there must be."""
_EPOCH, _GROUP, _RESPONSE = 0.5, 1 - 1 / 96, 1 - 1 / 256
"""What is kept of a prompt's sums from epoch to epoch, of everyone's from group to group, of the
errors from response to response."""
_RESIDUALS, _POINTS = 1024, 128
"""Responses that say how lengths spread, and points that stand for them."""


class LengthPredictor:
    """Predicts lengths in tokens; questions change nothing.

    Expectations are in (generated, longest] and never fall as `generated` grows. What is reported
    twice counts once; what is of a group that is not open, not at all.

    Args:
        longest: tokens at which a response ends whatever it says.
        generated: tokens that a trajectory has so far.
    """

    def __init__(self, longest: int, generated: Callable[[TrajectoryId], int]) -> None:
        self.longest, self.generated = longest, generated
        self._open: dict[GroupId, _Group] = {}
        self._prompts: dict[int, tuple[int, float, float]] = {}
        """Epoch, and decayed sums over responses: how many, log lengths. The latest is last."""
        # Before anything has ended: lognormal, with a mean of a quarter of the longest.
        self._within = [1.0, 0.5]
        """Decayed sums over groups: how many, variance of the log lengths of one group."""
        self._usual = [1.0, log(longest / 4) - 0.5, 0.5]
        """The same over groups: how many, mean log lengths, squares of how far off the mean."""
        self._known = [1.0, 0.5, 0.5, 0.6]
        """The same over groups whose prompt came before: how many, squares of how far its history
        was off the usual, products with how far the group then was, squares of that."""
        normal = (NormalDist().inv_cdf((i + 0.5) / _POINTS) for i in range(_POINTS))
        self._residuals = deque(normal, maxlen=_RESIDUALS)
        self._points_now: list[float] | None = None  # since the last group that ended
        self._expected: dict[tuple[GroupId, int], float] = {}
        self._left = self._total = 0.0
        """Decayed sums of squared errors: of predictions, and of the usual length."""
        self._seen: deque[tuple[float, float]] = deque(maxlen=RESPONSES)
        """Predicted and true log lengths of responses whose prompt came before."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "generated"}

    def open(self, group: GroupId, prompt: int, epoch: int) -> None:
        """A group of this prompt (row number) was requested."""
        if group not in self._open:
            _, weight, total = self._prompts.get(prompt, (epoch, 0.0, 0.0))
            opened = self._open[group] = _Group(prompt, epoch, weight, total, self._usual_length)
            opened.guess, _ = self._prior(opened)

    def finished(self, trajectory: TrajectoryId, length: int) -> None:
        """A response of an open group is complete, and was not cut short."""
        group = self._open.get(trajectory.group)
        if group is not None:
            group.logs.setdefault(trajectory.member, log(min(max(length, 1), self.longest)))

    def close(self, group: GroupId) -> None:
        """The group has ended: learn from it and forget it."""
        ended = self._open.pop(group, None)
        if ended is not None and ended.logs:
            self._learn(ended, list(ended.logs.values()))

    @property
    def explained_variance(self) -> float:
        """Share of the variance of log lengths that history explained lately, 0 to 1."""
        return max(0.0, 1 - self._left / self._total) if self._total else 0.0

    def metrics(self) -> dict[str, float]:
        """Metrics of docs/lengths.md, as far as they are known."""
        found = {"lengths/explained_variance": self.explained_variance}
        ranks = spearman(*zip(*self._seen, strict=True)) if len(self._seen) >= FEWEST else None
        return found if ranks is None else {**found, "lengths/rank_correlation": ranks}

    def expected(self, group: GroupId, generated: int = 0) -> float:
        """Mean tokens, when complete, of a member of this group that has `generated`."""
        found = self._open.get(group, _UNKNOWN)
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
        level, scale = self._level(self._open.get(group, _UNKNOWN))
        length = exp(level + scale * self._points[min(int(q * _POINTS), _POINTS - 1)])
        return min(max(length, 1.0), float(self.longest))

    @property
    def _usual_length(self) -> float:
        return self._usual[1] / self._usual[0]

    @property
    def _variance(self) -> float:
        """Of the log lengths of a group around its mean."""
        return max(self._within[1] / self._within[0], _LEAST)

    @property
    def _points(self) -> list[float]:
        """Means of equal parts of the standardised residuals, which stand for all of them."""
        if self._points_now is None:  # a whole batch ends at once, and nobody asks in between
            ordered, num = sorted(self._residuals), len(self._residuals)
            cuts = [i * num // _POINTS for i in range(_POINTS + 1)]
            self._points_now = [fmean(ordered[a:b]) for a, b in pairwise(cuts)]
        return self._points_now

    @property
    def _worth(self) -> float:
        """The slope of what came on what had been, less what chance alone would make it."""
        num, squares, products, came = self._known
        slope = products / squares
        if slope <= 0:
            return 0.0
        error = (came - slope * products) / (num * squares)  # squared
        return min(1.0, max(0.0, slope - error / slope))

    def _history(self, group: _Group) -> float:
        """How far the group's prompt was off the usual; less, the fewer responses there were."""
        doubt = self._variance / max(self._usual[2] / self._usual[0], _LEAST)
        return (group.total - group.weight * self._usual_length) / (doubt + group.weight)

    def _prior(self, group: _Group) -> tuple[float, float]:
        """Mean and variance of the level of a group of this prompt."""
        if not group.weight:
            return self._usual_length, max(self._usual[2] / self._usual[0], _LEAST)
        worth, (num, squares, products, came) = self._worth, self._known
        left = (came - 2 * worth * products + worth * worth * squares) / num
        return self._usual_length + worth * self._history(group), max(left, _LEAST)

    def _level(self, group: _Group) -> tuple[float, float]:
        """A group's level, and the deviation of its members' log lengths from it."""
        (prior, left), within = self._prior(group), self._variance
        precision = 1 / left + len(group.logs) / within
        level = (prior / left + sum(group.logs.values()) / within) / precision
        return level, sqrt(within + 1 / precision)

    def _mean(self, group: _Group, generated: int) -> float:
        level, scale = self._level(group)
        first = 0
        if generated:
            first = bisect_right(self._points, (log(generated) - level) / scale)
        above = [min(self.longest, exp(level + scale * z)) for z in self._points[first:]]
        mean = fmean(above) if above else 1.1 * generated
        return min(max(mean, generated + 1.0), float(self.longest))

    def _learn(self, group: _Group, logs: list[float]) -> None:
        self._expected.clear()
        mean, usual = fmean(logs), self._usual_length
        for y in logs:
            self._left = _RESPONSE * self._left + (y - group.guess) ** 2
            self._total = _RESPONSE * self._total + (y - group.usual) ** 2
        if group.weight:
            self._seen.extend((group.guess, y) for y in logs)
            off = self._history(group)
            _add(self._known, 1.0, off * off, off * (mean - usual), (mean - usual) ** 2)
        _add(self._usual, 1.0, mean, (mean - usual) ** 2)
        if len(logs) > 1:
            # Not `statistics.variance`, whose exact fractions took half the time of a batch's end.
            _add(self._within, 1.0, sum((y - mean) ** 2 for y in logs) / (len(logs) - 1))
        prior, left = self._prior(group)
        scale = sqrt(self._variance + left)
        self._residuals.extend((y - prior) / scale for y in logs)
        self._points_now = None
        self._remember(group, logs)

    def _remember(self, group: _Group, logs: list[float]) -> None:
        if group.prompt not in self._prompts and len(self._prompts) >= MAX_PROMPTS:
            oldest = next(iter(self._prompts))
            if self._prompts[oldest][0] >= group.epoch - 1:
                return
            del self._prompts[oldest]
        epoch, weight, total = self._prompts.pop(group.prompt, (group.epoch, 0.0, 0.0))
        keep = _EPOCH ** max(0, group.epoch - epoch)
        epoch = max(epoch, group.epoch)
        self._prompts[group.prompt] = epoch, keep * weight + len(logs), keep * total + sum(logs)


@dataclass(slots=True)
class _Group:
    """A group that has not ended. What its prompt's sums and the usual length were at its start."""

    prompt: int
    epoch: int
    weight: float
    total: float
    usual: float
    guess: float = 0.0
    logs: dict[int, float] = field(default_factory=dict)
    """Of the lengths of the members that have finished."""


_UNKNOWN = _Group(-1, 0, 0.0, 0.0, 0.0)
"""A group of a prompt never seen."""


def _add(sums: list[float], *values: float) -> None:
    """One more group."""
    for index, value in enumerate(values):
        sums[index] = _GROUP * sums[index] + value


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Rank correlation, equal values with their mean rank; None if all of one side are equal."""
    if min(a) == max(a) or min(b) == max(b):
        return None
    return correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(bisect_left(ordered, v) + bisect_right(ordered, v)) / 2 for v in values]
