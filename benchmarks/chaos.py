"""Real runs of the demo whose processes are killed and stopped: nothing may be lost or done twice.

A plan of faults is drawn from `--seed`. The injector, which is no part of the run, kills (SIGKILL)
or stops (SIGSTOP, 1 to 30 s) its controller, learner, instances, history and reward workers. Some
kills of the controller take the whole run, and the end of its log that was not on the disk. After a
controller's death it calls `rhymeflow resume`. When the run has ended, examples/audit_run.py must
find nothing wrong. Beside it runs the same without faults.

`--record` adds the run to results/chaos-runs.jsonl; the record counts all runs in it.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import harness
from benchmarks.faults.plan import Fault, draw_plan
from benchmarks.faults.run import Finished, run_with_faults
from benchmarks.training.train import ROOT
from rhymeflow.config import Config
from rhymeflow.config.load import read_config

RUNS = "chaos-runs.jsonl"
WORKER_TIMEOUT = 10.0
"""Seconds; long against a step, short against the longest stop."""
SETTINGS = {
    "data.eval_size": "16",
    "rollout.num_instances": "2",
    "run.worker_timeout": str(WORKER_TIMEOUT),
    "run.instance_restarts": "1000000",
    "run.save_seconds": "5",  # faults come more often than the default expects
    "run.report_to": "[]",
}
RECOVERY = {"rollout, killed": 8.0, "learner, killed": 15.0, "controller, killed": 15.0}
"""Targets: seconds from the fault to the next step that had not been trained before."""
EFFECTIVE = 0.8
"""Target: steps per second, of those without faults."""
NOTES = (
    "A fault's recovery is the time until the next step that had not been trained before it; the "
    "medians leave out faults that came before the run was over an earlier one. A stop of more "
    f"than {WORKER_TIMEOUT:g} seconds counts as a hang for the run. Effective time is the median "
    "over pairs of runs of steps per second with faults, loading after them included, over those "
    "without."
)


class Pair(msgspec.Struct):
    """A run with faults and one without, one right after the other: a line of the file."""

    seed: int
    steps_apart: int
    attacked: Finished
    quiet_speed: float
    """Steps per second of the run without faults."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    harness.add_number(parser, "--faults", 10, "faults of a run")
    harness.add_number(parser, "--runs", 1, "runs, with seeds from --seed on")
    harness.add_number(parser, "--apart", 30, "steps for each fault")
    what = "draws the plan (default: one for each run that is recorded)"
    parser.add_argument("--seed", type=harness.whole(0), metavar="N", help=what)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and report; with `--record`, together with all runs that were recorded."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing may stay, stopped for ever
    subprocess.run([sys.executable, "-m", "rhymeflow.workers.precompile"], cwd=ROOT, check=True)
    recorded = harness.RESULTS / RUNS
    pairs = read(recorded)
    first = len(pairs) if args.seed is None else args.seed
    if not args.record:
        pairs = []
    for seed in range(first, first + args.runs):
        pairs.append(measure(seed, args.faults, args.apart))
        if args.record:
            with recorded.open("ab") as lines:
                lines.write(msgspec.json.encode(pairs[-1]) + b"\n")
    return harness.report("chaos", rows(pairs), targets(pairs), args, notes(pairs))


def read(path: Path) -> list[Pair]:
    """All recorded runs."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return [msgspec.json.decode(line, type=Pair) for line in lines]


def measure(seed: int, num_faults: int, steps_apart: int) -> Pair:
    """One run with faults and one without; which is first changes from seed to seed."""
    plan = draw_plan(seed, num_faults, steps_apart, WORKER_TIMEOUT)
    plans: dict[str, list[Fault]] = {"attacked": plan, "quiet": []}
    found: dict[str, Finished] = {}
    folder = Path(tempfile.mkdtemp(prefix="rhymeflow-chaos-"))
    for side in sorted(plans, reverse=bool(seed % 2)):
        print(f"seed {seed}, {side}:", file=sys.stderr, flush=True)
        config = configuration((num_faults + 1) * steps_apart, folder / side)
        found[side] = run_with_faults(config, plans[side])
        for line in found[side].violations:
            print(f"  violation in {folder / side}: {line}", file=sys.stderr, flush=True)
    found["attacked"].violations += [f"without faults: {v}" for v in found["quiet"].violations]
    if not found["attacked"].violations:  # else it is looked into
        shutil.rmtree(folder)
    return Pair(seed, steps_apart, found["attacked"], found["quiet"].speed)


def configuration(max_steps: int, run_dir: Path) -> Config:
    """The demo, made for faults."""
    fields = {"learner.max_steps": str(max_steps), "run.output_dir": str(run_dir)}
    return read_config("demo", {**SETTINGS, **fields})


def rows(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """A row for each kind of fault."""
    faults = [one for pair in pairs for one in pair.attacked.faults]
    found = []
    for label in sorted({one.fault.label for one in faults}):
        those = [one for one in faults if one.fault.label == label]
        row: dict[str, Any] = {"fault": label, "faults": len(those)}
        if seconds := recoveries(pairs, label):
            row |= {"alone": len(seconds), **harness.spread("median s", seconds, 2)}
        found.append(row)
    return found


def recoveries(pairs: Sequence[Pair], label: str) -> list[float]:
    """Seconds of the faults of this row that came alone."""
    return [
        one.recovery
        for pair in pairs
        for one in pair.attacked.faults
        if one.fault.label == label and not one.is_again and one.recovery is not None
    ]


def targets(pairs: Sequence[Pair]) -> list[harness.Target]:
    """Violations, recoveries and effective training time."""
    violations = sum(len(pair.attacked.violations) for pair in pairs)
    found = [harness.Target("chaos/violations", violations, 0, at_most=True)]
    for label, most in RECOVERY.items():
        if seconds := recoveries(pairs, label):
            median = statistics.median(seconds)
            name = f"chaos/recovery/{label.partition(',')[0]}"
            found.append(harness.Target(name, median, most, at_most=True))
    if timed := both_went(pairs):
        attacked = [pair.attacked.speed for pair in timed]
        ratio = harness.median_ratio(attacked, [pair.quiet_speed for pair in timed])
        found.append(harness.Target("chaos/effective-time", ratio, EFFECTIVE))
    return found


def both_went(pairs: Sequence[Pair]) -> list[Pair]:
    """Pairs of which both runs came as far as to have a speed; the others have violations."""
    return [pair for pair in pairs if pair.attacked.speed and pair.quiet_speed]


def notes(pairs: Sequence[Pair]) -> str:
    """What the figures are of."""
    faults = sum(len(pair.attacked.faults) for pair in pairs)
    steps = sum(pair.attacked.steps for pair in pairs)
    resumed = sum(pair.attacked.resumed for pair in pairs)
    counts = f"{len(pairs)} runs, {steps} steps, {faults} faults, {resumed} times resumed"
    timed = both_went(pairs)
    if count := sum(len(pair.attacked.faults) for pair in timed):
        quiet = sum(pair.attacked.steps / pair.quiet_speed for pair in timed)
        attacked = sum(pair.attacked.steps / pair.attacked.speed for pair in timed)
        counts += (
            f"; a fault for each {quiet / count:.1f} s that the steps take without faults, and "
            f"{(attacked - quiet) / count:.1f} s lost by each"
        )
    return f"{counts}. {NOTES}"
