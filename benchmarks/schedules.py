"""The schedules side by side in real runs: trained trajectories per second on one recipe.

All on equal cores, each worker pinned: the learner has the first core, the rollout instances have
the others in turn (on two cores they share the second). So nobody wins by spreading over cores that
another leaves idle, and what a schedule wins is overlap and order. Counted is the time from the end
of the first step to the end of the last one counted; further steps follow, so that what ran ahead
at the end weighs against what ran ahead at the beginning. The event log of each run is read for the
greatest staleness of a trajectory trained on, and compared with the bound.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

from benchmarks import harness
from benchmarks.e2e import QUIET, call, training_rows
from rhymeflow import settings
from rhymeflow.config import Config, ScheduleConfig

NAMES: tuple[str, ...] = get_args(ScheduleConfig.model_fields["name"].annotation)
FIXED = {"synchronous": 0, "one_step": 1}
"""Schedules whose bound is theirs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--schedule", choices=NAMES, action="append", help="default: all of them")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10, help="steps counted after the first")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of one run each")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the schedules in turn and report."""
    names = args.schedule or list(NAMES)
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="rhymeflow-schedules-") as folder:
        sides = {
            name: functools.partial(measure, name, args, Path(folder), seen[name]) for name in names
        }
        values = harness.interleave(sides, args.repeats)
    rows = []
    for name in names:
        facts = {
            key: round(statistics.median(run[key] for run in seen[name]), 3)
            for key in ("idle/rollout", "idle/learner", "staleness/mean")
        }
        greatest = max(run["staleness/max"] for run in seen[name])
        row = harness.side_row(name, values[name], "trajectories/s")
        rows.append({**row, **facts, "greatest staleness": greatest})
    targets = []
    if "staleflow" in names:
        for name in names:
            if name != "staleflow":
                ratio = harness.median_ratio(values["staleflow"], values[name])
                targets.append(harness.Target(f"schedules/staleflow/{name}", ratio, 1.0))
    return harness.report("schedules", rows, targets, args, notes=notes(args))


def notes(args: argparse.Namespace) -> str:
    """How it was measured."""
    learner, instances = cores(args.instances)
    return (
        f"{args.recipe}, {args.instances} rollout instances, medians of {args.repeats} interleaved "
        f"runs of {args.steps} steps after the first. Cores: learner {learner}, instances "
        f"{instances}, one thread each. Bound {args.max_staleness} where the schedule leaves it "
        "open; the greatest staleness is read from the event log."
    )


def cores(num_instances: int) -> tuple[list[int], list[list[int]]]:
    """The learner's core, and each instance's: all others in turn."""
    first, *rest = sorted(os.sched_getaffinity(0))
    assert rest, "one core is not enough to compare schedules on"
    return [first], [[rest[index % len(rest)]] for index in range(num_instances)]


def measure(
    name: str, args: argparse.Namespace, folder: Path, seen: list[dict[str, float]]
) -> float:
    """Train under one schedule; return trajectories per second."""
    run_dir = folder / f"{name}-{len(seen)}"
    config = configure(name, args, run_dir)
    path = run_dir.with_suffix(".yaml")
    path.write_text(settings.dump(config), encoding="utf-8")
    call([sys.executable, "-m", "rhymeflow", "train", str(path)], "schedules")
    rows = training_rows(run_dir)
    greatest = max(row["staleness/max"] for row in rows)
    assert greatest <= config.schedule.bound, f"{name}: staleness {greatest}"
    counted = rows[1 : 1 + args.steps]
    facts = {
        key: statistics.mean(row[key] for row in counted)
        for key in ("idle/rollout", "idle/learner", "staleness/mean")
    }
    seen.append({**facts, "staleness/max": greatest})
    batch = config.learner.groups_per_batch * config.rollout.num_generations
    return len(counted) * batch / (counted[-1]["time"] - rows[0]["time"])


def configure(name: str, args: argparse.Namespace, run_dir: Path) -> Config:
    """The recipe under one schedule."""
    bound = FIXED.get(name, args.max_staleness)
    learner, instances = cores(args.instances)
    return settings.load(
        args.recipe,
        {
            **QUIET,
            "schedule.name": name,
            "schedule.max_staleness": str(bound),
            "rollout.num_instances": str(args.instances),
            "rollout.num_threads": "1",
            "learner.num_threads": "1",
            "rollout.cpus": json.dumps(instances),
            "learner.cpus": json.dumps(learner),
            "learner.max_steps": str(1 + args.steps + 1 + bound),
            "run.output_dir": str(run_dir),
        },
    )
