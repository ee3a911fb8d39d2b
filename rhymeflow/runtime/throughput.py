"""Rates and shares between two steps, from the totals that workers report.

Holds true: every share is of the time since the last step ended; what an instance did counts also
when it is gone, and once: instances report a moment late, and what a step has no time for is of the
next, so shares are right over several steps however short they are; pure arithmetic, time is an
argument. Knows nothing of processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rhymeflow.core.types import InstanceId
from rhymeflow.workers.messages import InstanceStatus, Part, TurnFigures


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

    since: float
    """When the current step's account began."""
    has_drafts: bool = False
    """Whether the run drafts."""
    statuses: dict[InstanceId, InstanceStatus] = field(default_factory=dict)
    pull_seconds: list[float] = field(default_factory=list)
    _tokens: int = 0
    _busy: float = 0.0
    _late_busy: float = 0.0
    """Of `_busy`, what no step had time for yet."""
    _coordination: dict[str, float] = field(default_factory=dict)
    _left: list[InstanceStatus] = field(default_factory=list)
    _generated: Generated = field(default_factory=Generated)
    _saved: float = 0.0
    _turns: Turns = field(default_factory=Turns)

    @property
    def running(self) -> int:
        """Trajectories being decoded, on all instances."""
        return sum(status.running for status in self.statuses.values())

    @property
    def waiting(self) -> int:
        """Trajectories routed but not being decoded, on all instances."""
        return sum(len(status.waiting) for status in self.statuses.values())

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

    def rollout_tokens_per_s(self, now: float) -> float:
        """Tokens generated per second since the step's account began, on all instances."""
        return (self._tokens_generated() - self._tokens) / max(now - self.since, 1e-9)

    def begin(self, now: float, coordination_seconds: dict[str, float]) -> None:
        """Open the first account; what was spent before is in none."""
        self.since, self._coordination = now, coordination_seconds

    def end_step(
        self, now: float, *, learner_seconds: float, coordination_seconds: dict[str, float]
    ) -> dict[str, float]:
        """Close the account; return its metrics and open the next.

        `coordination_seconds` are totals by part; `cpu`, all the controller computes, includes the
        others.
        """
        seconds = max(now - self.since, 1e-9)
        busy = sum(status.busy_seconds for status in self._all())
        metrics = {
            "step_time": seconds,
            "rollout/tokens_per_s": self.rollout_tokens_per_s(now),
            "idle/rollout": 1 - self._busy_share(busy - self._busy, seconds),
            "idle/learner": _share(1 - learner_seconds / seconds),
        }
        metrics |= self._end_coordination(seconds, coordination_seconds)
        metrics |= self._end_drafts(busy - self._busy)
        metrics |= self._turns.metrics()
        self._turns = Turns()
        if self.pull_seconds:
            metrics["params/pull_s"] = sum(self.pull_seconds) / len(self.pull_seconds)
        self.pull_seconds = []
        self._tokens = self._tokens_generated()
        self._busy, self.since = busy, now
        return metrics

    def _busy_share(self, reported: float, seconds: float) -> float:
        """Of the instances' time in a step, in which they reported to have been busy so long."""
        available = max(len(self.statuses), 1) * seconds
        busy = min(self._late_busy + reported, available)
        self._late_busy += reported - busy
        return busy / available

    def _end_drafts(self, busy_seconds: float) -> dict[str, float]:
        """Figures of drafting; a share of nothing is left out.

        Time is of all that instances did in `busy_seconds`, held-out answers included.
        """
        generated, self._generated = self._generated, Generated()
        if not self.has_drafts:
            return {}
        total = sum(status.drafts.saved_seconds for status in self._all())
        saved, self._saved = total - self._saved, total
        metrics = {"draft/time_saved": saved}
        if generated.steps:
            metrics["draft/mean_acceptance_length"] = generated.tokens / generated.steps
        if generated.drafted:
            # Each iteration generates one token without any draft.
            accepted = generated.tokens - generated.steps
            metrics["draft/acceptance_rate"] = accepted / generated.drafted
        if busy_seconds + saved > 0:
            metrics["draft/time_saved_share"] = saved / (busy_seconds + saved)
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

    def _all(self) -> list[InstanceStatus]:
        return [*self._left, *self.statuses.values()]

    def _tokens_generated(self) -> int:
        return sum(status.tokens for status in self._all())


def _share(value: float) -> float:
    # Workers have clocks of their own, so a share can be a little off either end.
    return min(max(value, 0.0), 1.0)
