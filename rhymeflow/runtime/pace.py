"""Rates and shares between two steps, from the totals that workers report.

Holds true: every share is of the time since the last step ended; pure arithmetic, time is an
argument. Knows nothing of processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rhymeflow.core.types import InstanceId
from rhymeflow.runtime.messages import InstanceStatus


@dataclass
class Pace:
    """How fast the run goes."""

    since: float
    """When the current step's account began."""
    statuses: dict[InstanceId, InstanceStatus] = field(default_factory=dict)
    pull_seconds: list[float] = field(default_factory=list)
    _tokens: int = 0
    _busy: float = 0.0

    @property
    def running(self) -> int:
        """Trajectories being decoded, on all instances."""
        return sum(status.running for status in self.statuses.values())

    @property
    def waiting(self) -> int:
        """Trajectories routed but not being decoded, on all instances."""
        return sum(status.waiting for status in self.statuses.values())

    def rollout_tokens_per_s(self, now: float) -> float:
        """Tokens made per second since the step's account began, on all instances."""
        made = sum(status.tokens for status in self.statuses.values())
        return (made - self._tokens) / max(now - self.since, 1e-9)

    def end_step(self, now: float, *, learner_seconds: float) -> dict[str, float]:
        """Close the account; return its metrics and open the next."""
        seconds = max(now - self.since, 1e-9)
        busy = sum(status.busy_seconds for status in self.statuses.values())
        instances = max(len(self.statuses), 1)
        metrics = {
            "step_time": seconds,
            "rollout/tokens_per_s": self.rollout_tokens_per_s(now),
            "idle/rollout": _share(1 - (busy - self._busy) / instances / seconds),
            "idle/learner": _share(1 - learner_seconds / seconds),
        }
        if self.pull_seconds:
            metrics["params/pull_s"] = sum(self.pull_seconds) / len(self.pull_seconds)
        self.pull_seconds = []
        self._tokens = sum(status.tokens for status in self.statuses.values())
        self._busy, self.since = busy, now
        return metrics


def _share(value: float) -> float:
    # Statuses arrive a moment after what they count, so a share can be a little off either end.
    return min(max(value, 0.0), 1.0)
