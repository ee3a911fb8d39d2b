"""The staleness protocol: a million operations with 65,536 groups in flight, on one core.

Steady state: every entry of the window is taken, and each round a group chosen at random finishes
(or, one in twenty, is filtered), batches are consumed as they become ready, and new groups start
under a version of the window until no entry is left. One group in ten has a member that starts a
version behind. Operations are what changes the buffers; reservations that are refused are in the
time but not in the count.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from typing import Any, NamedTuple

from benchmarks import harness
from rhymeflow.core.protocol.staleness import StalenessBuffers

OPERATIONS = ("reserve", "tighten", "occupy", "release", "consume")
SECONDS = 10.0
"""Target for a million operations."""
NOTES = (
    "{operations} operations a case, on one core; choosing what to do is in the time, which is the "
    "process's own, without that of others on the machine. The target is for the slowest case. In "
    "flight: most groups that held an entry at a time. 65,536 trajectories of 16 a group are 4,096 "
    "groups; 65,536 groups are sixteen times that."
)


class Case(NamedTuple):
    """A size of the protocol; `groups`: entries of all buffers in a window."""

    groups: int
    max_staleness: int
    extra_groups: int


CASES = (
    Case(4096, 1, 0),
    Case(4096, 3, 0),
    Case(4096, 3, 32),
    Case(65_536, 1, 0),
    Case(65_536, 3, 0),
    Case(65_536, 3, 512),
    Case(65_536, 8, 0),
)


class Load:
    """Does what a busy run would do to the protocol, one round after another."""

    def __init__(self, case: Case) -> None:
        self.buffers = StalenessBuffers(
            groups_per_batch=case.groups // (case.max_staleness + 1) - case.extra_groups,
            extra_groups=case.extra_groups,
            max_staleness=case.max_staleness,
            num_batches=10**9,
        )
        self.rng = random.Random(0)
        self.group_id = 0
        self.live: list[int] = []
        """Groups that were admitted and have not finished, some of them surplus."""
        self.held = self.most = 0
        self.done: Counter[str] = Counter()

    def round(self) -> None:
        """Consume what is ready, start what may start, let one group finish."""
        while self.buffers.ready():
            self.held -= len(self.buffers.consume())
            self.done["consume"] += 1
        while self.start():
            pass
        self.most = max(self.most, self.held)
        self._finish()

    def start(self) -> bool:
        """Start a group; whether an entry was left."""
        buffers, rng = self.buffers, self.rng
        version = max(0, buffers.first - int(rng.random() * (buffers.max_staleness + 1)))
        if buffers.reserve(self.group_id, version) is None:
            self.done["refused"] += 1
            return False
        self.held += 1
        self.done["reserve"] += 1
        if version and rng.random() < 0.1:
            buffers.tighten(self.group_id, version - 1)
            self.done["tighten"] += 1
        self.live.append(self.group_id)
        self.group_id += 1
        return True

    def _finish(self) -> None:
        live = self.live
        pick = int(self.rng.random() * len(live))
        live[pick], live[-1] = live[-1], live[pick]
        group = live.pop()
        if self.buffers.place(group) is None:  # it was surplus
            return
        if self.rng.random() < 0.05:
            surplus = self.buffers.release(group)
            self.held -= 1
            self.done["release"] += 1
        else:
            surplus = self.buffers.occupy(group)
            self.done["occupy"] += 1
        self.held -= len(surplus)
        self.done["surplus"] += len(surplus)


def measure(case: Case, operations: int) -> dict[str, Any]:
    """One row: the case, seconds, and how many operations of each kind."""
    load = Load(case)
    while load.start():  # the window fills up before the clock starts
        pass
    load.done.clear()
    start = time.process_time()
    while (done := sum(load.done[name] for name in OPERATIONS)) < operations:
        load.round()
    seconds = time.process_time() - start
    return {
        **case._asdict(),
        "in flight": load.most,
        "operations": done,
        "seconds": round(seconds, 3),
        "s per million": round(seconds / done * 1e6, 3),
        **{name: load.done[name] for name in (*OPERATIONS, "refused", "surplus")},
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    harness.add_number(parser, "--operations", 1_000_000, "of each case")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases and report them."""
    rows = [measure(case, args.operations) for case in CASES]
    slowest = max(row["s per million"] for row in rows)
    name = "protocol/seconds_per_million_operations"
    targets = [harness.Target(name, slowest, SECONDS, at_most=True)]
    return harness.report("protocol", rows, targets, args, NOTES.format(operations=args.operations))
