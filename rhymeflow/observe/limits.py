"""What limits a run: its learner, rollout, or the staleness bound, which lets neither continue.

The rule. Over the last `WINDOW` steps, weighted by their time, r is the share of time for which
instances were idle, and l that of the learner. The first step is left out once there is another,
since it contains the start of everything.

- r and l below `BUSY`: `balanced`.
- r - l >= `BUSY`: `learner`; instances wait for it.
- l - r >= `BUSY`: `rollout`; the learner waits for it.
- otherwise both idle, about as long. If a response was as old as the bound allows, they take turns:
  `bound`. If none was, both wait for something else: `elsewhere` (rewards, environments, weights).

A verdict is kept if the rule gives it with `MARGIN` more or less than `BUSY`, so that it does not
flicker near a threshold. At a bound of one or more, long and short steps alternate; a mean over an
even number of them does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["balanced", "learner", "rollout", "bound", "elsewhere"]

WINDOW = 8
BUSY = 0.15
MARGIN = 0.05

_SAID: Mapping[Verdict, str] = {
    "balanced": "balanced",
    "learner": "limited by the learner",
    "rollout": "limited by rollout",
    "bound": "limited by the staleness bound",
    "elsewhere": "limited by what both wait for",
}


@dataclass(frozen=True)
class Limit:
    """What limits the run, and the idle shares (0 to 1) over this many `steps`."""

    verdict: Verdict
    idle_rollout: float
    idle_learner: float
    steps: int

    @property
    def said(self) -> str:
        """The verdict in words."""
        return _SAID[self.verdict]

    @property
    def line(self) -> str:
        """The verdict with its shares, the one that matters first."""
        rollout, learner = f"{self.idle_rollout:.0%}", f"{self.idle_learner:.0%}"
        if self.verdict == "rollout":
            return f"{self.said}: learner idle {learner}, instances {rollout}"
        return f"{self.said}: instances idle {rollout}, learner {learner}"


class Limits:
    """Takes in the metrics of each step; `now` is what limits the run, None before the first."""

    def __init__(self, bound: int) -> None:
        """`bound`: of the staleness."""
        self._bound = bound
        self._recent: deque[tuple[Any, ...]] = deque(maxlen=WINDOW)
        self._count = 0
        self.now: Limit | None = None

    def add(self, row: Mapping[str, Any]) -> None:
        """Take in the metrics of a step; rows without its times are ignored."""
        step = tuple(map(row.get, ("step_time", "idle/rollout", "idle/learner")))
        if None in step:
            return
        self._count += 1
        if self._count == 2:
            self._recent.clear()
        self._recent.append((*step, row.get("staleness/max") or 0.0))
        total = sum(took for took, *_ in self._recent) or 1.0
        rollout = sum(took * idle for took, idle, _, _ in self._recent) / total
        learner = sum(took * idle for took, _, idle, _ in self._recent) / total
        is_at_bound = max(oldest for *_, oldest in self._recent) >= self._bound
        found = [
            verdict(rollout, learner, is_at_bound=is_at_bound, busy=busy)
            for busy in (BUSY, BUSY - MARGIN, BUSY + MARGIN)
        ]
        was = self.now.verdict if self.now is not None else None
        chosen = was if was in found else found[0]
        self.now = Limit(chosen, rollout, learner, len(self._recent))


def verdict(rollout: float, learner: float, *, is_at_bound: bool, busy: float = BUSY) -> Verdict:
    """What limits a run, by the idle shares of instances and learner."""
    if max(rollout, learner) < busy:
        return "balanced"
    if abs(rollout - learner) >= busy:
        return "learner" if rollout > learner else "rollout"
    return "bound" if is_at_bound else "elsewhere"


def of_rows(rows: Iterable[Mapping[str, Any]], bound: int) -> Limit | None:
    """What limits a run, by the metrics of its steps; None: no step has idle shares."""
    limits = Limits(bound)
    for row in rows:
        limits.add(row)
    return limits.now
