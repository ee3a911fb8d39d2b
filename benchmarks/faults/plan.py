"""Which faults a run gets, drawn from a seed before it starts, and the account of what they did.

In a dense plan every kind comes equally often, give or take one. A fault is due some seconds after
a step, so such a plan means the same on fast machines and slow ones; a plan of rates goes by the
seconds since the first step. A run has recovered with the first step that was never trained before.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

PROCESSES = ("controller", "learner", "rollout", "history", "reward")
"""Kinds of processes. A fault of `rollout` meets one of the instances."""
DISK = "disk"
"""The disk of the run directory; it can become full."""

Action = Literal["killed", "stopped", "slowed", "full"]
ACTION_SHARES: dict[Action, float] = {"killed": 0.6, "stopped": 0.2, "slowed": 0.2}
"""Of the faults of processes."""
SECONDS = (1.0, 30.0)
"""Shortest and longest stop or slowness. Half of them are shorter than the run's timeout."""
AGAIN_SHARE = 0.15
"""Of the faults, how many come soon after the one before, which the run may not have got over."""
AGAIN_SECONDS = 5.0
DELAY_SECONDS = 2.0
"""Longest wait after the step: a fault should find a run anywhere in a step, not at its end."""
WAL_BYTES = 64 * 1024
"""Most that the log loses when its controller's machine goes down."""

INSTANCE_PERIOD, CORE_PERIOD = 30.0, 120.0
"""Seconds for one fault of an instance, and for one of the learner or the controller in turn."""


class Fault(msgspec.Struct, frozen=True):
    """One planned fault."""

    step: int
    """Trained steps after which it is due ..."""
    delay: float
    """... so many seconds later."""
    kind: str
    action: Action = "killed"
    seconds: float = 0.0
    """How long the process is stopped or slow."""
    wal_bytes: int = 0
    """Of a controller's kill: all processes die with it, as when a machine goes down, and so much
    is cut off the end of the log."""
    draw: float = 0.0
    """From 0 to below 1: which of several processes of the kind it meets."""

    @property
    def label(self) -> str:
        return f"{self.kind}, {self.action}" + (", log cut" if self.wal_bytes else "")


def draw_dense(
    seed: int, num_faults: int, steps_apart: int, timeout: float, kinds: Sequence[str]
) -> list[Fault]:
    """Draw faults, the first after step `steps_apart` at the latest, in the order they are due.

    `timeout` is the run's `worker_timeout` in seconds.
    """
    rng = random.Random(seed)
    drawn: list[str] = []
    while len(drawn) < num_faults:
        drawn += rng.sample(kinds, len(kinds))
    plan: list[Fault] = []
    for number, kind in enumerate(drawn[:num_faults]):
        step = number * steps_apart + rng.randint(1, steps_apart)
        delay = rng.uniform(0, DELAY_SECONDS)
        if plan and rng.random() < AGAIN_SHARE:
            step, delay = plan[-1].step, plan[-1].delay + rng.uniform(0, AGAIN_SECONDS)
        plan.append(_draw(rng, step, delay, kind, timeout))
    return plan


def _draw(rng: random.Random, step: int, delay: float, kind: str, timeout: float) -> Fault:
    if kind == DISK:
        return Fault(step, delay, kind, "full")
    (action,) = rng.choices(list(ACTION_SHARES), list(ACTION_SHARES.values()))
    seconds, wal_bytes = 0.0, 0
    if action != "killed":
        shortest, longest = SECONDS
        is_short = rng.random() < 0.5
        seconds = rng.uniform(shortest, timeout) if is_short else rng.uniform(timeout, longest)
    elif kind == "controller" and rng.random() < 0.5:
        wal_bytes = rng.randint(1, WAL_BYTES)
    return Fault(step, delay, kind, action, seconds, wal_bytes, rng.random())


def draw_rates(seed: int, seconds: float) -> list[Fault]:
    """Draw kills at the rates above for so many seconds, in the order they are due.

    Each period has one, anywhere in it; the learner's and the controller's come in turn.
    """
    rng = random.Random(seed)
    plan = []
    for period, kinds in ((INSTANCE_PERIOD, ["rollout"]), (CORE_PERIOD, ["learner", "controller"])):
        rng.shuffle(kinds)
        for number in range(int(seconds / period)):
            delay = (number + rng.random()) * period
            plan.append(Fault(1, delay, kinds[number % len(kinds)], draw=rng.random()))
    return sorted(plan, key=lambda fault: fault.delay)


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
        return all(one.recovery is not None for one in self.injected)

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
        one = Injected(self._plan.popleft(), now, self.newest, not self.is_over_all)
        self.injected.append(one)
        return one

    def speed(self) -> float:
        """Steps per second from the end of the first to that of the last; 0: fewer than two."""
        seconds = sorted(self.steps.values())
        return (len(seconds) - 1) / (seconds[-1] - seconds[0]) if len(seconds) > 1 else 0.0
