"""Finds what limits a run: learner, rollout, or the staleness bound, by the shares of idle time.

The rule: over the last `WINDOW` steps, weighted by their time, r is the share of time in which
instances were idle, and l that of the learner. The first step is left out once there is another,
because it contains starting up.

- r and l below `BUSY`: `balanced`.
- r - l >= `BUSY`: `learner`; instances wait for it.
- l - r >= `BUSY`: `rollout`; the learner waits for it.
- otherwise both idle for similar times. If a response was as old as the bound allows, they take
  turns: `bound`. Else both wait for rewards, environments or weights: `elsewhere`.

The last verdict stays if the rule gives it with `BUSY` plus or minus `MARGIN`, so that it does not
flicker near a threshold. `WINDOW` is even because long and short steps alternate at a bound of one
or more."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

LimitKind = Literal["balanced", "learner", "rollout", "bound", "elsewhere"]

WINDOW = 8
BUSY = 0.15
MARGIN = 0.05
LAST_ROWS = 1_000  # rows of metrics that `of_rows` reads, the last ones

_SAID: Mapping[LimitKind, str] = {
    "balanced": "balanced",
    "learner": "limited by the learner",
    "rollout": "limited by rollout",
    "bound": "limited by the staleness bound",
    "elsewhere": "limited by what both wait for",
}


@dataclass(frozen=True)
class Limit:
    """What limits the run, and the idle shares (0 to 1) over this many `steps`."""

    verdict: LimitKind
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
    """Reads the metrics of each step; `now` is the present limit, None before the first step."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._recent: deque[tuple[Any, ...]] = deque(maxlen=WINDOW)
        self._count = 0
        self.now: Limit | None = None

    def add(self, row: Mapping[str, Any]) -> None:
        """Read the metrics of a step; rows without times are ignored."""
        step = tuple(map(row.get, ("step_time", "idle/rollout", "idle/learner")))
        if None in step:
            return
        self._count += 1
        if self._count == 2:
            self._recent.clear()
        self._recent.append((*step, row.get("staleness/max") or 0.0))
        total = sum(seconds for seconds, *_ in self._recent) or 1.0
        rollout = sum(seconds * idle for seconds, idle, _, _ in self._recent) / total
        learner = sum(seconds * idle for seconds, _, idle, _ in self._recent) / total
        is_at_bound = max(oldest for *_, oldest in self._recent) >= self._bound
        verdicts = [
            verdict(rollout, learner, is_at_bound=is_at_bound, busy=busy)
            for busy in (BUSY, BUSY - MARGIN, BUSY + MARGIN)
        ]
        last = self.now.verdict if self.now is not None else None
        chosen = last if last in verdicts else verdicts[0]
        self.now = Limit(chosen, rollout, learner, len(self._recent))


def verdict(rollout: float, learner: float, *, is_at_bound: bool, busy: float = BUSY) -> LimitKind:
    """Return what limits a run with these idle shares of instances and learner."""
    if max(rollout, learner) < busy:
        return "balanced"
    if abs(rollout - learner) >= busy:
        return "learner" if rollout > learner else "rollout"
    return "bound" if is_at_bound else "elsewhere"


def of_rows(rows: Sequence[Mapping[str, Any]], bound: int) -> Limit | None:
    """Return the limit by the metrics of a run's steps, None if no step has idle shares."""
    limits = Limits(bound)
    for row in rows[-LAST_ROWS:]:
        limits.add(row)
    return limits.now
