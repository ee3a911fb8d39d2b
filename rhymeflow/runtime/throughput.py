"""Computes rates and shares of time between two steps from the totals that workers report.

Idle shares cover the last step; rates and the share that drafts saved cover the last steps that
took `WINDOW` together. Instances report late: busy time that exceeds a step counts for the next."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from rhymeflow.core.types import InstanceId
from rhymeflow.environments.episode import TurnFigures
from rhymeflow.workers.messages import Part, Status

WINDOW = 1.0
"""Seconds, in which an instance reports four times. A step may end before the next report."""


class _Totals(NamedTuple):
    """Totals since the run began, at the end of a step; times in seconds."""

    time: float
    tokens: int = 0  # generated
    busy: float = 0.0  # of all instances
    saved: float = 0.0  # by drafts
    behind: float = 0.0  # what an emulated cluster would have been faster
    trained: float = 0.0  # tokens


class Throughput:
    """Measures the steps of a run."""

    def __init__(self, *, has_drafts: bool = False, window: float = WINDOW) -> None:
        self._has_drafts, self._window = has_drafts, window
        self.trained_tokens_per_s: float | None = None
        """Tokens of prompts and responses that were trained on, per second, in the last steps."""
        self.statuses: dict[InstanceId, Status] = {}
        self.pull_seconds: list[float] = []
        self._left: list[Status] = []
        """The last statuses of instances that are gone, whose work still counts."""
        self._ends: deque[_Totals] = deque()
        """Totals at the end of the last steps, from the newest that is at least `WINDOW` old."""
        self._late_busy = 0.0  # busy seconds that exceeded the steps so far
        self._coordination: dict[str, float] = {}  # total seconds by part, up to this step
        self._step: Counter[str] = Counter()
        """Counts of this step: tokens of training responses, their iterations and drafted tokens;
        turns that environments answered."""
        self._turn_seconds = 0.0

    @property
    def running(self) -> int:
        """Trajectories being decoded, on all instances."""
        return sum(status.running for status in self.statuses.values())

    @property
    def waiting(self) -> int:
        """Trajectories routed but not being decoded, on all instances."""
        return sum(status.waiting for status in self.statuses.values())

    def leave(self, instance: InstanceId) -> None:
        """Note that an instance is gone."""
        if instance in self.statuses:
            self._left.append(self.statuses.pop(instance))

    def add(self, part: Part) -> None:
        """Count a generated part of a training response."""
        self._step["tokens"] += len(part.tokens)
        self._step["iterations"] += part.steps
        self._step["drafted"] += part.drafted

    def add_turn(self, figures: TurnFigures) -> None:
        """Count a turn that an environment answered, or with which it ended the response."""
        self._turn_seconds += figures.seconds
        self._step["turns"] += 1
        self._step["turns with calls"] += figures.calls > 0
        self._step["calls"] += figures.calls
        self._step["failed calls"] += figures.failed_calls

    def begin(self, now: float, coordination_seconds: dict[str, float], trained: float) -> None:
        """Begin the first step, `trained` tokens into the run; earlier work is not measured."""
        self._coordination = coordination_seconds
        self._ends = deque([_Totals(now, trained=trained)])

    def end_step(
        self,
        now: float,
        *,
        trained: float,
        learner_seconds: float,
        coordination_seconds: dict[str, float],
    ) -> dict[str, float]:
        """End the step: return its metrics and begin the next. `trained`: tokens so far.
        `coordination_seconds`: totals by part; `cpu` covers all parts."""
        before, total = self._ends[-1], self._totals(now, trained)
        seconds = max(now - before.time, 1e-9)
        while len(self._ends) > 1 and self._ends[1].time <= now - self._window:
            self._ends.popleft()
        window_start = self._ends[0]
        self._ends.append(total)
        window = max(now - window_start.time, 1e-9)
        self.trained_tokens_per_s = (trained - window_start.trained) / window
        metrics = {
            "step_time": seconds,
            "rollout/tokens_per_s": (total.tokens - window_start.tokens) / window,
            "idle/rollout": 1 - self._busy_share(total.busy - before.busy, seconds),
            # Workers' clocks differ, so the share can lie slightly outside of [0, 1].
            "idle/learner": min(max(1 - learner_seconds / seconds, 0.0), 1.0),
        }
        metrics |= self._coordination_metrics(seconds, coordination_seconds)
        if self._has_drafts:
            metrics["draft/time_saved"] = total.saved - before.saved
            metrics |= self._draft_ratios(window_start, total)
        if (behind := total.behind - before.behind) > 0 and total.busy > before.busy:
            metrics["emulation/rollout_behind"] = behind / (total.busy - before.busy)
        metrics |= self._turn_metrics()
        if self.pull_seconds:
            metrics["params/pull_s"] = sum(self.pull_seconds) / len(self.pull_seconds)
        self.pull_seconds, self._step, self._turn_seconds = [], Counter(), 0.0
        return metrics

    def _totals(self, now: float, trained: float) -> _Totals:
        statuses = [*self._left, *self.statuses.values()]
        return _Totals(
            now,
            sum(status.tokens for status in statuses),
            sum(status.busy_seconds for status in statuses),
            sum(status.drafts.saved_seconds for status in statuses),
            sum(status.behind_seconds for status in statuses),
            trained,
        )

    def _busy_share(self, reported: float, seconds: float) -> float:
        """Return the busy share of a step of `seconds`. `reported`: all instances' busy seconds."""
        available = max(len(self.statuses), 1) * seconds
        busy = min(self._late_busy + reported, available)
        self._late_busy += reported - busy
        return busy / available

    def _draft_ratios(self, window_start: _Totals, total: _Totals) -> dict[str, float]:
        """Leaves out a ratio whose denominator is 0. `window_start`: totals as the window began."""
        step, metrics = self._step, dict[str, float]()
        if step["iterations"]:
            metrics["draft/mean_acceptance_length"] = step["tokens"] / step["iterations"]
        if step["drafted"]:
            # Each iteration generates one token without any draft.
            accepted = step["tokens"] - step["iterations"]
            metrics["draft/acceptance_rate"] = accepted / step["drafted"]
        saved = total.saved - window_start.saved
        if (undrafted := total.busy - window_start.busy + saved) > 0:
            metrics["draft/time_saved_share"] = saved / undrafted
        return metrics

    def _turn_metrics(self) -> dict[str, float]:
        """Uses TRL's names where it has them; leaves out a ratio whose denominator is 0."""
        step, metrics = self._step, dict[str, float]()
        if step["turns"]:
            metrics["env/step_s"] = self._turn_seconds / step["turns"]
            metrics["tools/call_frequency"] = step["turns with calls"] / step["turns"]
        if step["calls"]:
            metrics["tools/failure_frequency"] = step["failed calls"] / step["calls"]
        return metrics

    def _coordination_metrics(self, seconds: float, totals: dict[str, float]) -> dict[str, float]:
        spent = {part: total - self._coordination.get(part, 0.0) for part, total in totals.items()}
        self._coordination = totals
        cpu = spent.pop("cpu")
        return {
            **{f"coordination/{part}_s": part_seconds for part, part_seconds in spent.items()},
            "coordination/share": sum(spent.values()) / seconds,
            "coordination/cpu_share": cpu / seconds,
        }
