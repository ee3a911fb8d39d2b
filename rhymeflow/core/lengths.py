"""Predicts response lengths from decayed means of finished lengths, by prompt and by group.

All means are of log(tokens). A group's prior mean is: overall mean + weight * deviation of its
prompt's earlier responses from the overall mean. Responses count half as much with each epoch that
has passed. The weight, 0 to 1, is how well history explained recent groups. Members that finish
turn the prior into a posterior. The residuals of recent responses give the distribution of lengths
around it."""

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
_MIN_VARIANCE = 1e-4  # lower bound of variances, which are 0 if all lengths are equal
RANKED_RESPONSES, MIN_RANKED_RESPONSES = 512, 32
"""Latest responses in the rank correlation, and the fewest for which it is reported."""
_EPOCH_DECAY, _GROUP_DECAY, _RESPONSE_DECAY = 0.5, 1 - 1 / 96, 1 - 1 / 256
"""Factors by which older values lose weight in a prompt's sums, per epoch; in means over groups,
per group; in sums of errors, per response."""
_RESIDUALS, _POINTS = 1024, 128
"""Latest residuals that are kept, and the number of quantiles that summarise them."""


@dataclass(slots=True)
class _DecayedMean:
    """The mean of a value of each group; older groups count less."""

    total: float
    count: float = 1.0

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def variance(self) -> float:
        """The mean, if the values are variances."""
        return max(self.mean, _MIN_VARIANCE)

    def add(self, value: float) -> None:
        self.total = _GROUP_DECAY * self.total + value
        self.count = _GROUP_DECAY * self.count + 1.0


@dataclass(slots=True)
class _DecayedRegression:
    """The regression of y on x, without a constant; older pairs count less."""

    xx: float
    xy: float
    yy: float
    count: float = 1.0

    @property
    def shrunk_slope(self) -> float:
        """The slope, shrunk by its error; 0 to 1."""
        slope = self.xy / self.xx
        if slope <= 0:
            return 0.0
        squared_error = (self.yy - slope * self.xy) / (self.count * self.xx)
        return min(1.0, max(0.0, slope - squared_error / slope))

    def residual_variance(self, slope: float) -> float:
        """Mean square of `y - slope * x`."""
        return (self.yy - 2 * slope * self.xy + slope * slope * self.xx) / self.count

    def add(self, x: float, y: float) -> None:
        self.xx = _GROUP_DECAY * self.xx + x * x
        self.xy = _GROUP_DECAY * self.xy + x * y
        self.yy = _GROUP_DECAY * self.yy + y**2
        self.count = _GROUP_DECAY * self.count + 1.0


class LengthPredictor:
    """Predicts lengths in tokens; queries do not change what it knows.

    Expected lengths are in (generated, longest] and never fall as `generated` grows. A response
    that is reported twice counts once; reports about a group that is not open are ignored.

    Args:
        longest: most tokens of a response.
        generated: returns how many tokens a trajectory has generated so far."""

    def __init__(self, longest: int, generated: Callable[[TrajectoryId], int]) -> None:
        self.longest, self.generated = longest, generated
        self._open: dict[GroupId, _Group] = {}
        self._prompts: dict[int, tuple[int, float, float]] = {}
        """By prompt, latest last: (epoch, decayed number of responses and sum of log lengths)."""
        # Before any group has ended: lognormal, with a quarter of `longest` as its mean.
        self._within = _DecayedMean(0.5)  # the variance of log lengths within a group
        self._overall = _DecayedMean(log(longest / 4) - 0.5)  # the mean log length of a group
        self._between = _DecayedMean(0.5)
        """The squared deviation of a group's mean from the overall mean before the group."""
        self._recurring = _DecayedRegression(xx=0.5, xy=0.5, yy=0.6)
        """Over groups whose prompt came before: x and y are the deviations of the prompt's earlier
        responses (`_history`) and of the group from the overall mean."""
        normal = (NormalDist().inv_cdf((i + 0.5) / _POINTS) for i in range(_POINTS))
        self._residuals = deque(normal, maxlen=_RESIDUALS)
        self._points_now: list[float] | None = None  # cached by `_points`; None: out of date
        self._expected: dict[tuple[GroupId, int], float] = {}
        self._error = self._overall_error = 0.0
        """Decayed sums of the squared errors of predictions and of the overall mean."""
        self._ranked: deque[tuple[float, float]] = deque(maxlen=RANKED_RESPONSES)
        """Predicted and true log lengths of responses whose prompt came before."""

    def __getstate__(self) -> dict[str, Any]:
        """All but `generated`, which the coordinator's state sets again."""
        return {name: value for name, value in vars(self).items() if name != "generated"}

    def open(self, group: GroupId, prompt: int, epoch: int) -> None:
        """Record that a group of this prompt (row number) was requested."""
        if group not in self._open:
            _, num_earlier, sum_earlier = self._prompts.get(prompt, (epoch, 0.0, 0.0))
            overall = self._overall.mean
            opened = self._open[group] = _Group(prompt, epoch, num_earlier, sum_earlier, overall)
            opened.predicted, _ = self._prior(opened)

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
        """Return the metrics of docs/lengths.md. The rank correlation is left out while there are
        fewer than `MIN_RANKED_RESPONSES`, or if predictions or lengths are constant."""
        metrics = {"lengths/explained_variance": self.explained_variance}
        is_known = len(self._ranked) >= MIN_RANKED_RESPONSES
        ranks = spearman(*zip(*self._ranked, strict=True)) if is_known else None
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
    def _points(self) -> list[float]:
        """The standardised residuals, summarised by the means of `_POINTS` equal parts."""
        if self._points_now is None:  # computed on demand, as a whole batch ends at once
            ordered, num = sorted(self._residuals), len(self._residuals)
            cuts = [i * num // _POINTS for i in range(_POINTS + 1)]
            self._points_now = [fmean(ordered[a:b]) for a, b in pairwise(cuts)]
        return self._points_now

    def _history(self, group: _Group) -> float:
        """Return the deviation of the prompt's earlier responses, shrunk if they are few."""
        # Within-group over between-group variance: the responses that the overall mean counts for.
        pseudo_count = self._within.variance / self._between.variance
        deviations = group.sum_earlier - group.num_earlier * self._overall.mean
        return deviations / (pseudo_count + group.num_earlier)

    def _prior(self, group: _Group) -> tuple[float, float]:
        """Return the prior mean and variance of the group's level, its expected log length."""
        if not group.num_earlier:
            return self._overall.mean, self._between.variance
        weight = self._recurring.shrunk_slope
        variance = self._recurring.residual_variance(weight)
        return self._overall.mean + weight * self._history(group), max(variance, _MIN_VARIANCE)

    def _level(self, group: _Group) -> tuple[float, float]:
        """Return the posterior mean of the group's level, and the standard deviation of a member's
        log length."""
        (prior, variance), within = self._prior(group), self._within.variance
        precision = 1 / variance + len(group.logs) / within
        level = (prior / variance + sum(group.logs.values()) / within) / precision
        return level, sqrt(within + 1 / precision)

    def _mean(self, group: _Group, generated: int) -> float:
        """Return the expected length, in tokens, of a member that has `generated` tokens."""
        level, scale = self._level(group)
        first = 0
        if generated:
            first = bisect_right(self._points, (log(generated) - level) / scale)
        above = [min(self.longest, exp(level + scale * z)) for z in self._points[first:]]
        mean = fmean(above) if above else 1.1 * generated  # longer than all: guess a tenth more
        return min(max(mean, generated + 1.0), float(self.longest))

    def _learn(self, group: _Group, logs: list[float]) -> None:
        """Learn from the log lengths of a group's finished members."""
        self._expected.clear()
        self._score(group, logs)
        self._update_means(group, logs)
        self._update_residuals(group, logs)
        self._remember(group, logs)

    def _score(self, group: _Group, logs: list[float]) -> None:
        """Compare what was predicted when the group was requested with its lengths."""
        for y in logs:
            self._error = _RESPONSE_DECAY * self._error + (y - group.predicted) ** 2
            self._overall_error = _RESPONSE_DECAY * self._overall_error + (y - group.overall) ** 2
        if group.num_earlier:
            self._ranked.extend((group.predicted, y) for y in logs)

    def _update_means(self, group: _Group, logs: list[float]) -> None:
        mean = fmean(logs)
        deviation = mean - self._overall.mean
        if group.num_earlier:
            self._recurring.add(self._history(group), deviation)
        self._overall.add(mean)
        self._between.add(deviation**2)
        if len(logs) > 1:
            # Not `statistics.variance`, whose exact fractions took half the time of a batch's end.
            self._within.add(sum((y - mean) ** 2 for y in logs) / (len(logs) - 1))

    def _update_residuals(self, group: _Group, logs: list[float]) -> None:
        # From the means just updated, since predictions add the residuals to these.
        prior, variance = self._prior(group)
        scale = sqrt(self._within.variance + variance)
        self._residuals.extend((y - prior) / scale for y in logs)
        self._points_now = None

    def _remember(self, group: _Group, logs: list[float]) -> None:
        """Add the responses to their prompt's sums."""
        if group.prompt not in self._prompts and len(self._prompts) >= MAX_PROMPTS:
            oldest = next(iter(self._prompts))
            if self._prompts[oldest][0] >= group.epoch - 1:
                return
            del self._prompts[oldest]
        epoch, count, total = self._prompts.pop(group.prompt, (group.epoch, 0.0, 0.0))
        decay = _EPOCH_DECAY ** max(0, group.epoch - epoch)
        epoch = max(epoch, group.epoch)
        self._prompts[group.prompt] = epoch, decay * count + len(logs), decay * total + sum(logs)


@dataclass(slots=True)
class _Group:
    """A group that has not ended, and what was known when it was requested."""

    prompt: int
    epoch: int
    num_earlier: float  # decayed number of the prompt's earlier responses
    sum_earlier: float  # decayed sum of their log lengths
    overall: float  # overall mean
    predicted: float = 0.0  # prior mean of the group's level
    logs: dict[int, float] = field(default_factory=dict)  # log lengths of finished members


_UNKNOWN = _Group(-1, 0, 0.0, 0.0, 0.0)  # a group of a prompt never seen


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the rank correlation, with mean ranks for ties; None if `a` or `b` is constant."""
    if min(a) == max(a) or min(b) == max(b):
        return None
    return correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(bisect_left(ordered, v) + bisect_right(ordered, v)) / 2 for v in values]
