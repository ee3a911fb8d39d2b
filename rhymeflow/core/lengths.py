"""Predicts response lengths from decayed means of finished lengths, by prompt and by group.

All means are of log(tokens). A group's prior is the overall mean, shifted by the deviation of its
prompt's earlier responses (halved per epoch) times a weight from 0 to 1: how well history explained
recent groups. Finished members update it. Recent residuals give the distribution around it.
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
"""Most prompts remembered. A further prompt replaces the one seen longest ago, unless that came in
this epoch or the last: else every prompt would be forgotten before it returns."""
_MIN_VARIANCE = 1e-4
"""Lower bound of variances, which are 0 if all lengths are equal."""
RESPONSES, FEWEST = 512, 32
"""Latest responses in the rank correlation, and the fewest for which it is reported."""
_EPOCH_DECAY, _GROUP_DECAY, _RESPONSE_DECAY = 0.5, 1 - 1 / 96, 1 - 1 / 256
"""Decay factors: of a prompt's sums per epoch, of sums over groups per group, and of the sums of
errors per response."""
_RESIDUALS, _POINTS = 1024, 128
"""Latest residuals that are kept, and the number of quantiles that summarise them."""


class LengthPredictor:
    """Predicts lengths in tokens; queries do not change what it knows.

    Expected lengths are in (generated, longest] and never fall as `generated` grows. A response
    that is reported twice counts once; reports about a group that is not open are ignored.

    Args:
        longest: most tokens of a response.
        generated: returns the tokens that a trajectory has generated so far.
    """

    def __init__(self, longest: int, generated: Callable[[TrajectoryId], int]) -> None:
        self.longest, self.generated = longest, generated
        self._open: dict[GroupId, _Group] = {}
        self._prompts: dict[int, tuple[int, float, float]] = {}
        """By prompt, latest last: (epoch, decayed sum of 1 over responses, of log length)."""
        # Before any group has ended: lognormal, with a quarter of `longest` as its mean.
        self._within = [1.0, 0.5]
        """Decayed sums over groups of 1 and of the variance of log lengths within the group."""
        self._overall = [1.0, log(longest / 4) - 0.5, 0.5]
        """Decayed sums over groups of 1, of the mean log length, and of its squared deviation from
        the overall mean before the group."""
        self._recurring = [1.0, 0.5, 0.5, 0.6]
        """Decayed sums of 1, h², h d and d² over groups whose prompt came before. h and d are the
        deviations of the prompt's history and of the group from the overall mean."""
        normal = (NormalDist().inv_cdf((i + 0.5) / _POINTS) for i in range(_POINTS))
        self._residuals = deque(normal, maxlen=_RESIDUALS)
        self._points_now: list[float] | None = None  # cached by `_points`; None: out of date
        self._expected: dict[tuple[GroupId, int], float] = {}
        self._error = self._overall_error = 0.0
        """Decayed sums of the squared errors of predictions and of the overall mean."""
        self._seen: deque[tuple[float, float]] = deque(maxlen=RESPONSES)
        """Predicted and true log lengths of responses whose prompt came before."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "generated"}

    def open(self, group: GroupId, prompt: int, epoch: int) -> None:
        """Record that a group of this prompt (row number) was requested."""
        if group not in self._open:
            _, weight, total = self._prompts.get(prompt, (epoch, 0.0, 0.0))
            opened = self._open[group] = _Group(prompt, epoch, weight, total, self._overall_mean)
            opened.guess, _ = self._prior(opened)

    def finished(self, trajectory: TrajectoryId, length: int) -> None:
        """Record a complete response of `length` tokens, unless its group is not open."""
        group = self._open.get(trajectory.group)
        if group is not None:
            group.logs.setdefault(trajectory.member, log(min(max(length, 1), self.longest)))

    def close(self, group: GroupId) -> None:
        """Learn from the finished members of a group that has ended, and forget the group."""
        ended = self._open.pop(group, None)
        if ended is not None and ended.logs:
            self._learn(ended, list(ended.logs.values()))

    @property
    def explained_variance(self) -> float:
        """Share of the recent variance of log lengths that history explained, 0 to 1."""
        return max(0.0, 1 - self._error / self._overall_error) if self._overall_error else 0.0

    def metrics(self) -> dict[str, float]:
        """Return the metrics of docs/lengths.md; the rank correlation only from `FEWEST` on."""
        metrics = {"lengths/explained_variance": self.explained_variance}
        ranks = spearman(*zip(*self._seen, strict=True)) if len(self._seen) >= FEWEST else None
        return metrics if ranks is None else {**metrics, "lengths/rank_correlation": ranks}

    def expected(self, group: GroupId, generated: int = 0) -> float:
        """Return the expected final length, in tokens, of a member that has `generated` tokens."""
        record = self._open.get(group, _UNKNOWN)
        if generated > 0:
            return self._mean(record, min(generated, self.longest))
        key = group, len(record.logs)  # cached: strategies ask this often
        if key not in self._expected:
            self._expected[key] = self._mean(record, 0)
        return self._expected[key]

    def remaining(self, trajectory: TrajectoryId) -> float:
        """Return the expected number of tokens still to be generated, at least 1."""
        generated = self.generated(trajectory)
        return max(1.0, self.expected(trajectory.group, generated) - generated)

    def quantile(self, group: GroupId, q: float) -> float:
        """Return the q-quantile of the length, in tokens, of a member that has not begun."""
        level, scale = self._level(self._open.get(group, _UNKNOWN))
        length = exp(level + scale * self._points[min(int(q * _POINTS), _POINTS - 1)])
        return min(max(length, 1.0), float(self.longest))

    @property
    def _overall_mean(self) -> float:
        return self._overall[1] / self._overall[0]

    @property
    def _variance(self) -> float:
        """Variance of log lengths within a group."""
        return max(self._within[1] / self._within[0], _MIN_VARIANCE)

    @property
    def _points(self) -> list[float]:
        """The standardised residuals, summarised by the means of `_POINTS` equal parts."""
        if self._points_now is None:  # computed on demand, as a whole batch ends at once
            ordered, num = sorted(self._residuals), len(self._residuals)
            cuts = [i * num // _POINTS for i in range(_POINTS + 1)]
            self._points_now = [fmean(ordered[a:b]) for a, b in pairwise(cuts)]
        return self._points_now

    @property
    def _history_weight(self) -> float:
        """The slope of the regression of d on h (see `_recurring`), shrunk by its error; 0 to 1."""
        num, squares, products, outcomes = self._recurring
        slope = products / squares
        if slope <= 0:
            return 0.0
        error = (outcomes - slope * products) / (num * squares)  # squared standard error
        return min(1.0, max(0.0, slope - error / slope))

    def _history(self, group: _Group) -> float:
        """Deviation of the prompt's history from the overall mean, shrunk if responses are few."""
        doubt = self._variance / max(self._overall[2] / self._overall[0], _MIN_VARIANCE)
        return (group.total - group.weight * self._overall_mean) / (doubt + group.weight)

    def _prior(self, group: _Group) -> tuple[float, float]:
        """Prior mean and variance of the group's level, its expected log length."""
        if not group.weight:
            return self._overall_mean, max(self._overall[2] / self._overall[0], _MIN_VARIANCE)
        weight, (num, squares, products, outcomes) = self._history_weight, self._recurring
        spread = (outcomes - 2 * weight * products + weight * weight * squares) / num
        return self._overall_mean + weight * self._history(group), max(spread, _MIN_VARIANCE)

    def _level(self, group: _Group) -> tuple[float, float]:
        """Posterior mean of the group's level, and standard deviation of a member's log length."""
        (prior, spread), within = self._prior(group), self._variance
        precision = 1 / spread + len(group.logs) / within
        level = (prior / spread + sum(group.logs.values()) / within) / precision
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
        mean = fmean(logs)
        off = mean - self._overall_mean
        for y in logs:
            self._error = _RESPONSE_DECAY * self._error + (y - group.guess) ** 2
            self._overall_error = _RESPONSE_DECAY * self._overall_error + (y - group.overall) ** 2
        if group.weight:
            self._seen.extend((group.guess, y) for y in logs)
            history = self._history(group)
            _add(self._recurring, 1.0, history * history, history * off, off**2)
        _add(self._overall, 1.0, mean, off**2)
        if len(logs) > 1:
            # Not `statistics.variance`, whose exact fractions took half the time of a batch's end.
            _add(self._within, 1.0, sum((y - mean) ** 2 for y in logs) / (len(logs) - 1))
        prior, spread = self._prior(group)
        scale = sqrt(self._variance + spread)
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
        keep = _EPOCH_DECAY ** max(0, group.epoch - epoch)
        epoch = max(epoch, group.epoch)
        self._prompts[group.prompt] = epoch, keep * weight + len(logs), keep * total + sum(logs)


@dataclass(slots=True)
class _Group:
    """A group that has not ended, with its prompt's sums and the means when it was requested."""

    prompt: int
    epoch: int
    weight: float  # decayed number of the prompt's earlier responses
    total: float  # decayed sum of their log lengths
    overall: float  # overall mean
    guess: float = 0.0  # prior mean of the group's level
    logs: dict[int, float] = field(default_factory=dict)
    """Log lengths of the members that have finished."""


_UNKNOWN = _Group(-1, 0, 0.0, 0.0, 0.0)
"""A group of a prompt never seen."""


def _add(sums: list[float], *values: float) -> None:
    """Decay the sums by one group's factor, and add its values."""
    for index, value in enumerate(values):
        sums[index] = _GROUP_DECAY * sums[index] + value


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the rank correlation, with mean ranks for ties; None if `a` or `b` is constant."""
    if min(a) == max(a) or min(b) == max(b):
        return None
    return correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(bisect_left(ordered, v) + bisect_right(ordered, v)) / 2 for v in values]
