"""The account of a run under faults: which are due, what they did, when training went on.

Holds true: a run has recovered from a fault with the first step after it that had not been trained
before it; a step that is trained a second time does not count. Time is an argument. Knows nothing
of processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from benchmarks.faults.plan import Fault


class Injected(msgspec.Struct):
    """A fault that was injected, and what came of it. Seconds are those since the run's start."""

    fault: Fault
    at: float
    after_step: int
    """Newest step that had been trained."""
    is_again: bool
    """Whether the run was not over an earlier fault."""
    cut: int = 0
    """Bytes that were cut off the log."""
    recovery: float | None = None
    """Seconds until the next step was trained; `None`: none was."""


class Account:
    """What is known of one run from outside."""

    def __init__(self, plan: Iterable[Fault]) -> None:
        self._plan = deque(plan)
        self.injected: list[Injected] = []
        self.steps: dict[int, float] = {}
        """By step, when it was first seen trained."""

    @property
    def newest(self) -> int:
        """The newest step ever trained; 0: none."""
        return max(self.steps, default=0)

    @property
    def is_over_all(self) -> bool:
        """Whether training went on after each fault so far."""
        return all(one.recovery is not None for one in self.injected)

    @property
    def num_left(self) -> int:
        """Faults of the plan that were not injected."""
        return len(self._plan)

    def trained(self, steps: Iterable[int], now: float) -> None:
        """Note the steps that the run has trained; those that are known change nothing."""
        for step in sorted(set(steps) - set(self.steps)):
            self.steps[step] = now
            for one in self.injected:
                if one.recovery is None and step > one.after_step:
                    one.recovery = now - one.at

    def due(self, now: float) -> Fault | None:
        """The next fault of the plan, if it is time for it."""
        if not self._plan:
            return None
        fault = self._plan[0]
        reached = [at for step, at in self.steps.items() if step >= fault.step]
        return fault if reached and now >= min(reached) + fault.delay else None

    def inject(self, now: float) -> Injected:
        """Note that the next fault of the plan is injected now."""
        one = Injected(self._plan.popleft(), now, self.newest, not self.is_over_all)
        self.injected.append(one)
        return one

    def speed(self) -> float:
        """Steps per second from the end of the first step to the end of the last.

        Raises:
            ValueError: fewer than two steps were trained.
        """
        if len(self.steps) < 2:
            raise ValueError(f"{len(self.steps)} steps have no speed")
        return (len(self.steps) - 1) / (max(self.steps.values()) - min(self.steps.values()))
