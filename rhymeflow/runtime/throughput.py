"""Rates and shares between two steps, from the totals that workers report.

Holds true: idle shares are of the time since the last step ended, rates and the time that drafts
saved of that of the last steps which took `WINDOW` together; what an instance did counts also
when it is gone, and once: instances report a moment late, and what a step has no time for is of the
next, so shares are right over several steps however short they are; pure arithmetic, time is an
argument. Knows nothing of processes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from rhymeflow.core.types import InstanceId
from rhymeflow.workers.messages import Part, Status, TurnFigures

WINDOW = 1.0
"""Seconds: four reports of an instance. A step may be shorter than it takes until the next one."""


class _Totals(NamedTuple):
    """Since the run began, at the end of a step."""

    time: float
    tokens: int = 0
    busy: float = 0.0
    saved: float = 0.0
    trained: float = 0.0


@dataclass(slots=True)
class Generated:
    """What was generated of training responses in a step.

    Held-out answers are drafted too, but not counted here: greedy ones repeat more.
    """

    tokens: int = 0
    steps: int = 0
    drafted: int = 0


@dataclass(slots=True)
class Turns:
    """What environments were asked in a step."""

    count: int = 0
    seconds: float = 0.0
    with_calls: int = 0
    calls: int = 0
    failed_calls: int = 0

    def metrics(self) -> dict[str, float]:
        """Under TRL's names, where it has them; a share of nothing is left out."""
        if not self.count:
            return {}
        found = {
            "env/step_s": self.seconds / self.count,
            "tools/call_frequency": self.with_calls / self.count,
        }
        if self.calls:
            found["tools/failure_frequency"] = self.failed_calls / self.calls
        return found


@dataclass
class Throughput:
    """How fast the run goes."""

    trained_tokens_per_s: float | None = None
    """Prompts and responses, in the last steps."""
    has_drafts: bool = False
    """Whether the run drafts."""
    statuses: dict[InstanceId, Status] = field(default_factory=dict)
    pull_seconds: list[float] = field(default_factory=list)
    _ends: deque[_Totals] = field(default_factory=deque)
    """Of the last steps: the last that ended `WINDOW` ago, and those since."""
    _late_busy: float = 0.0
    """Seconds that instances were busy and that no step had time for yet."""
    _coordination: dict[str, float] = field(default_factory=dict)
    _left: list[Status] = field(default_factory=list)
    _generated: Generated = field(default_factory=Generated)
    _turns: Turns = field(default_factory=Turns)

    @property
    def running(self) -> int:
        """Trajectories being decoded, on all instances."""
        return sum(status.running for status in self.statuses.values())

    @property
    def waiting(self) -> int:
        """Trajectories routed but not being decoded, on all instances."""
        return sum(status.waiting for status in self.statuses.values())

    def leave(self, instance: InstanceId) -> None:
        """An instance is gone; what it did stays counted."""
        if instance in self.statuses:
            self._left.append(self.statuses.pop(instance))

    def add(self, part: Part) -> None:
        """Part of a training response was generated."""
        self._generated.tokens += len(part.tokens)
        self._generated.steps += part.steps
        self._generated.drafted += part.drafted

    def add_turn(self, figures: TurnFigures) -> None:
        """An environment answered a turn, or ended the response with it."""
        turns = self._turns
        turns.count += 1
        turns.seconds += figures.seconds
        turns.with_calls += figures.calls > 0
        turns.calls += figures.calls
        turns.failed_calls += figures.failed_calls

    def begin(self, now: float, coordination_seconds: dict[str, float], trained: float) -> None:
        """Open the first account, `trained` tokens into the run; what was before is in none."""
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
        """Close the account; return its metrics and open the next.

        `trained`: tokens, in the whole run. `coordination_seconds` are totals by part; `cpu`, all
        the controller computes, includes the others.
        """
        before, total = self._ends[-1], self._totals(now, trained)
        seconds = max(now - before.time, 1e-9)
        while len(self._ends) > 1 and self._ends[1].time <= now - WINDOW:
            self._ends.popleft()
        first = self._ends[0]
        self._ends.append(total)
        passed = max(now - first.time, 1e-9)
        self.trained_tokens_per_s = (trained - first.trained) / passed
        metrics = {
            "step_time": seconds,
            "rollout/tokens_per_s": (total.tokens - first.tokens) / passed,
            "idle/rollout": 1 - self._busy_share(total.busy - before.busy, seconds),
            "idle/learner": _share(1 - learner_seconds / seconds),
        }
        metrics |= self._end_coordination(seconds, coordination_seconds)
        metrics |= self._end_drafts(first, total.saved - before.saved, total)
        metrics |= self._turns.metrics()
        self._turns = Turns()
        if self.pull_seconds:
            metrics["params/pull_s"] = sum(self.pull_seconds) / len(self.pull_seconds)
        self.pull_seconds = []
        return metrics

    def _totals(self, now: float, trained: float) -> _Totals:
        found = [*self._left, *self.statuses.values()]
        return _Totals(
            now,
            sum(status.tokens for status in found),
            sum(status.busy_seconds for status in found),
            sum(status.drafts.saved_seconds for status in found),
            trained,
        )

    def _busy_share(self, reported: float, seconds: float) -> float:
        """Of the instances' time in a step, in which they reported to have been busy so long."""
        available = max(len(self.statuses), 1) * seconds
        busy = min(self._late_busy + reported, available)
        self._late_busy += reported - busy
        return busy / available

    def _end_drafts(self, first: _Totals, saved: float, total: _Totals) -> dict[str, float]:
        """Figures of drafting; a share of nothing is left out. `saved`: seconds, in the step alone.

        Time is of all that instances did, held-out answers included.
        """
        generated, self._generated = self._generated, Generated()
        if not self.has_drafts:
            return {}
        metrics = {"draft/time_saved": saved}
        if generated.steps:
            metrics["draft/mean_acceptance_length"] = generated.tokens / generated.steps
        if generated.drafted:
            # Each iteration generates one token without any draft.
            accepted = generated.tokens - generated.steps
            metrics["draft/acceptance_rate"] = accepted / generated.drafted
        saved = total.saved - first.saved
        if (undrafted := total.busy - first.busy + saved) > 0:
            metrics["draft/time_saved_share"] = saved / undrafted
        return metrics

    def _end_coordination(self, seconds: float, totals: dict[str, float]) -> dict[str, float]:
        since = {part: total - self._coordination.get(part, 0.0) for part, total in totals.items()}
        self._coordination = totals
        cpu = since.pop("cpu")
        return {
            **{f"coordination/{part}_s": spent for part, spent in since.items()},
            "coordination/share": sum(since.values()) / seconds,
            "coordination/cpu_share": cpu / seconds,
        }


def _share(value: float) -> float:
    # Workers have clocks of their own, so a share can be a little off either end.
    return min(max(value, 0.0), 1.0)
