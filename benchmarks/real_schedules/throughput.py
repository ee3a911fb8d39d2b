"""Trained trajectories per second of each schedule.

Counted is the time from the end of the first step to the end of the last one counted; further steps
follow, so that what ran ahead at the end weighs against what ran ahead at the beginning. The event
log of each run is read for the greatest staleness of a trajectory trained on, and compared with the
bound.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.e2e import QUIET, call, training_rows
from benchmarks.real_schedules.sides import BOUNDS, NAMES, Side, cores, overrides, sides
from rhymeflow.config import Config
from rhymeflow.config.load import dump_config, read_config

FACTS = ("idle/rollout", "idle/learner", "staleness/mean", "coordination/share")


def add_arguments(parser: Any) -> None:
    """Add this part's options."""
    parser.add_argument(
        "--steps", type=harness.positive, default=10, help="steps counted after the first"
    )
    parser.add_argument(
        "--repeats", type=harness.positive, default=3, help="rounds of one run each"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the schedules in turn and report."""
    chosen = sides(args.schedule or NAMES, args.bound or BOUNDS)
    seen: dict[Side, list[dict[str, float]]] = {side: [] for side in chosen}
    with tempfile.TemporaryDirectory(prefix="rhymeflow-schedules-") as folder:
        measures = {
            str(side): functools.partial(measure, side, args, Path(folder), seen[side])
            for side in chosen
        }
        values = harness.interleave(measures, args.repeats)
    rows = []
    for side in chosen:
        facts = {key: round(statistics.median(run[key] for run in seen[side]), 3) for key in FACTS}
        greatest = max(run["staleness/max"] for run in seen[side])
        row = harness.side_row(str(side), values[str(side)], "trajectories/s")
        rows.append({**row, **facts, "greatest staleness": greatest})
    return harness.report("schedules", rows, targets(values, rows), args, notes=notes(args))


def targets(values: dict[str, list[float]], rows: Sequence[dict[str, Any]]) -> list[harness.Target]:
    """`staleflow` at its greatest bound against all others, and what coordination costs."""
    ours = [side for side in values if side.startswith("staleflow")][-1:]
    ratios = [
        harness.Target(
            f"schedules/{own}/{other}", harness.median_ratio(values[own], values[other]), 1.0
        )
        for own in ours
        for other in values
        if other != own
    ]
    cost = max(row["coordination/share"] for row in rows)
    return [*ratios, harness.Target("coordination/share", cost, 0.01, at_most=True)]


def notes(args: argparse.Namespace) -> str:
    """How it was measured."""
    learner, instances = cores(args.instances)
    return (
        f"{args.recipe}, {args.instances} rollout instances, medians of {args.repeats} interleaved "
        f"runs of {args.steps} steps after the first. Cores: learner {learner}, instances "
        f"{instances}, one thread each. The greatest staleness is read from the event log. "
        "Coordination is the share of the time spent in the coordinator and in the store. "
        "Shares are of all the time counted."
    )


def measure(
    side: Side, args: argparse.Namespace, folder: Path, seen: list[dict[str, float]]
) -> float:
    """Train under one schedule; return trajectories per second."""
    run_dir = folder / f"{side.schedule}-{side.bound}-{len(seen)}"
    config = configure(side, args, run_dir)
    path = run_dir.with_suffix(".yaml")
    path.write_text(dump_config(config), encoding="utf-8")
    call([sys.executable, "-m", "rhymeflow", "train", str(path)], "schedules")
    rows = training_rows(run_dir)
    greatest = max(row["staleness/max"] for row in rows)
    assert greatest <= side.bound, f"{side}: staleness {greatest}"
    counted = rows[1 : 1 + args.steps]
    seconds = sum(row["step_time"] for row in counted)
    facts = {key: sum(row[key] * row["step_time"] for row in counted) / seconds for key in FACTS}
    seen.append({**facts, "staleness/max": greatest})
    batch = config.learner.groups_per_batch * config.rollout.num_generations
    return len(counted) * batch / (counted[-1]["time"] - rows[0]["time"])


def configure(side: Side, args: argparse.Namespace, run_dir: Path) -> Config:
    """The recipe under one schedule."""
    return read_config(
        args.recipe,
        {
            **QUIET,
            **overrides(side, args.instances),
            "learner.max_steps": str(1 + args.steps + 1 + side.bound),
            "run.output_dir": str(run_dir),
        },
    )
