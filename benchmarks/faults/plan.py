"""Which faults a run gets, and when: drawn from a seed before it starts.

Holds true: the same seed gives the same plan; every kind of process comes equally often, give or
take one. A fault is due some seconds after a step of training, so a plan means the same on a fast
machine and on a slow one.
"""

from __future__ import annotations

import random

import msgspec

KINDS = ("controller", "learner", "rollout", "history", "reward")
"""Kinds of processes. A fault of `rollout` meets one of the instances."""

STOP_SHARE = 0.4
"""Of the faults, how many stop a process for a while; the others kill it."""
STOP_SECONDS = (1.0, 30.0)
"""Shortest and longest stop. Half of them are shorter than the run's timeout."""
AGAIN_SHARE = 0.15
"""Of the faults, how many come soon after the one before, which the run may not have got over."""
AGAIN_SECONDS = 5.0
DELAY_SECONDS = 2.0
"""Longest wait after the step: a fault should find a run anywhere in a step, not at its end."""
WAL_BYTES = 64 * 1024
"""Most that the log loses when its controller's machine goes down."""


class Fault(msgspec.Struct, frozen=True):
    """One planned fault."""

    step: int
    """Trained steps after which it is due ..."""
    delay: float
    """... so many seconds later."""
    kind: str
    seconds: float | None = None
    """How long the process is stopped; `None`: it is killed."""
    wal_bytes: int = 0
    """Of a controller's kill: all processes die with it, as when a machine goes down, and so much
    is cut off the end of the log."""
    draw: float = 0.0
    """From 0 to below 1: which of several processes of the kind it meets."""

    @property
    def label(self) -> str:
        """The row of the table that it counts in."""
        if self.seconds is not None:
            return f"{self.kind}, stopped"
        return f"{self.kind}, killed" + (", log cut" if self.wal_bytes else "")


def draw_plan(seed: int, num_faults: int, steps_apart: int, timeout: float) -> list[Fault]:
    """Draw faults, the first after step `steps_apart` at the latest, in the order they are due.

    `timeout` is the run's `worker_timeout` in seconds.
    """
    rng = random.Random(seed)
    kinds: list[str] = []
    while len(kinds) < num_faults:
        kinds += rng.sample(KINDS, len(KINDS))
    plan: list[Fault] = []
    for number, kind in enumerate(kinds[:num_faults]):
        step = number * steps_apart + rng.randint(1, steps_apart)
        delay = rng.uniform(0, DELAY_SECONDS)
        if plan and rng.random() < AGAIN_SHARE:
            step, delay = plan[-1].step, plan[-1].delay + rng.uniform(0, AGAIN_SECONDS)
        seconds, wal_bytes = None, 0
        if rng.random() < STOP_SHARE:
            shortest, longest = STOP_SECONDS
            is_short = rng.random() < 0.5
            seconds = rng.uniform(shortest, timeout) if is_short else rng.uniform(timeout, longest)
        elif kind == "controller" and rng.random() < 0.5:
            wal_bytes = rng.randint(1, WAL_BYTES)
        plan.append(Fault(step, delay, kind, seconds, wal_bytes, rng.random()))
    return plan
