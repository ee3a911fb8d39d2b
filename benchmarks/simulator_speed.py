"""How long the simulator takes, on one core, for a large cluster and for a very large one.

Processor time for 10 versions of recipe `cluster` under `staleflow`, responses of 4,000 tokens on
average, batches of 128 and of 1,024 groups of 16.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Mapping
from typing import Any

from benchmarks import harness
from rhymeflow.config import Config
from rhymeflow.config.load import read_config
from rhymeflow.sim.simulate import run as simulate
from rhymeflow.sim.workload import workload

SIZES = {32: (128, 5.0), 1024: (1024, 120.0)}
"""Instances: groups of 16 in a batch, and the seconds it may take."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_number(parser, "--repeats", 3, "simulations of each size")


def run(args: argparse.Namespace) -> dict[str, Any]:
    values = harness.interleave(
        {str(size): functools.partial(seconds, size) for size in SIZES}, args.repeats
    )
    rows = [harness.side_row(f"{size} instances", values[str(size)], "s") for size in SIZES]
    targets = [
        harness.at_most(f"simulator/{size} instances", row["median"], SIZES[size][1])
        for size, row in zip(SIZES, rows, strict=True)
    ]
    return harness.report("simulator_speed", rows, targets, args, __doc__ or "")


def seconds(instances: int) -> float:
    started = time.process_time()
    config = configure(instances, {"learner.groups_per_batch": str(SIZES[instances][0])})
    result = simulate(config, workload(config, None))
    assert max(result.staleness) <= config.schedule.bound
    return time.process_time() - started


def configure(instances: int, settings: Mapping[str, str]) -> Config:
    """Recipe `cluster` with so many instances and learner ranks, and these settings."""
    return read_config(
        "cluster",
        {
            "drafting.window": "off",
            "schedule.name": "staleflow",
            "learner.max_steps": "10",
            "rollout.num_instances": str(instances),
            "learner.num_ranks": str(instances),
            "simulation.workload.mean_length": "4000",
            **settings,
        },
    )
