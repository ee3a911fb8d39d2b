"""How long the coordinator takes for one call of `handle`, with many instances.

It drives a simulated cluster whose instances are full. Each call is timed alone, by the processor's
clock of its thread, from the first version on, so without filling the instances, and until the run
nears its end. After a publication all pull: what is in flight is interrupted and routed anew.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections import defaultdict
from typing import Any
from unittest import mock

from benchmarks import harness
from benchmarks.simulator_speed import configure
from rhymeflow.core.commands import Command
from rhymeflow.core.coordinator import Coordinator
from rhymeflow.core.events import Event, Tick, VersionPublished
from rhymeflow.sim import cluster
from rhymeflow.sim.simulate import run as simulate
from rhymeflow.sim.workload import workload

CAPACITY = 64
"""Trajectories an instance decodes at a time."""
SCHEDULE, BOUND, VERSIONS = "staleflow", 5, 6


class Timed(Coordinator):
    """A coordinator that adds the seconds of its calls, by the name of the event."""

    def __init__(self, seconds: dict[str, list[float]], *args: Any) -> None:
        super().__init__(*args)
        self.version, self.seconds = 0, seconds

    def handle(self, event: Event) -> list[Command]:
        if isinstance(event, VersionPublished):
            self.version = event.version
        started = time.thread_time()
        commands = super().handle(event)
        if 1 <= self.version <= VERSIONS:
            self.seconds[type(event).__name__].append(time.thread_time() - started)
        return commands


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_number(parser, "--instances", 1024, "of rollout")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Simulate and report."""
    times = measure(args.instances)
    together = [t for seconds in times.values() for t in seconds]
    rows = [row(name, seconds) for name, seconds in {**times, "all calls": together}.items()]
    # Of the call that plans: among a million small ones its times do not show.
    planning = times[Tick.__name__]
    p99 = harness.percentile(planning, 0.99) * 1e3
    targets = [
        harness.at_most("coordinator/Tick, p99 ms", p99, 10),
        harness.at_most("coordinator/Tick, greatest ms", max(planning) * 1e3, 100),
    ]
    notes = (
        f"{args.instances} simulated instances of {CAPACITY} trajectories each, schedule "
        f"{SCHEDULE}, bound {BOUND}, versions 1 to {VERSIONS}. Processor time."
    )
    return harness.report("coordinator", rows, targets, args, notes=notes)


def measure(instances: int) -> dict[str, list[float]]:
    """Seconds of calls, by the name of the event."""
    config = configure(
        instances,
        {
            "schedule.name": SCHEDULE,
            "schedule.max_staleness": str(BOUND),
            "rollout.max_num_seqs": str(CAPACITY),
            "learner.groups_per_batch": str(instances),
            "learner.max_steps": str(VERSIONS + BOUND + 1),
        },
    )
    seconds: dict[str, list[float]] = defaultdict(list)
    gc.collect()
    gc.disable()  # its pauses belong to whoever makes cycles; the coordinator makes none
    with mock.patch.object(cluster, "Coordinator", functools.partial(Timed, seconds)):
        simulate(config, workload(config, None))
    gc.enable()
    return seconds


def row(name: str, times: list[float]) -> dict[str, Any]:
    return {
        "call": name,
        "calls": len(times),
        "median ms": harness.percentile(times, 0.5) * 1e3,
        "p99 ms": harness.percentile(times, 0.99) * 1e3,
        "greatest ms": max(times) * 1e3,
        "sum s": sum(times),
    }
