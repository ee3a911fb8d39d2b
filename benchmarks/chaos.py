"""Real runs of the demo under faults: nothing may be lost or done twice.

Its processes are killed, stopped and slowed, its disk gets full, messages come twice and late; some
kills take the whole run and the end of its log. It is resumed after a controller's end, and in the
end examples/audit_run.py must find nothing wrong. `--timed` kills at the rates of faults/plan.py
beside the same run without faults. `--record` adds the run to those of results/chaos-runs.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import harness
from benchmarks.faults import plan
from benchmarks.faults.run import Finished, SmallDisk, can_mount, run_with_faults
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
DENSE = {"learner.groups_per_batch": "4", "run.eval_steps": "50"}
"""A quarter of the demo's step. What processes do and say to each other is the same."""
SETUPS: tuple[dict[str, str], ...] = (
    {},
    {"weights.transport": "delta"},
    {"weights.transport": "delta", "learner.num_ranks": "2"},
    {"weights.transport": "delta", "model.lora.rank": "8"},
)
"""What dense runs change besides, by turns of the seed. With ranks, a fault of the learner meets
one of them."""
STEPS_APART = 2
MAX_SECONDS = 36_000.0
"""Longer than a timed run lasts."""
RECOVERY = {"rollout, killed": 8.0, "learner, killed": 15.0, "controller, killed": 15.0}
"""Targets: seconds from the fault to the next step that had not been trained before."""
EFFECTIVE = 0.8
"""Target: steps per second, of those without faults."""
NOTES = (
    "A fault's recovery is the time until the next step that had not been trained before it; the "
    "medians are of the timed runs, and leave out faults that came before the run was over an "
    f"earlier one. A timed run has a kill of an instance every {plan.INSTANCE_PERIOD:g} s, and of "
    f"the learner or the controller every {plan.CORE_PERIOD:g} s. A stop of more than "
    f"{WORKER_TIMEOUT:g} seconds counts as a hang for the run. Effective time is the median over "
    "pairs of runs of steps per second with faults, loading after them included, over those "
    "without."
)


class Attacked(msgspec.Struct):
    """A run with faults: a line of the file."""

    seed: int
    run: Finished
    quiet_speed: float | None = None
    """Of a timed run: steps per second of the run without faults right before or after it."""
    setup: dict[str, str] = {}
    """What the run changed of the configuration that all have."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "kill at fixed rates beside a run without faults, and compare their speed"
    parser.add_argument("--timed", action="store_true", help=what)
    harness.add_number(parser, "--faults", 50, "faults of a run that is not timed")
    harness.add_number(parser, "--steps", 400, "steps of a timed run")
    harness.add_number(parser, "--runs", 1, "runs, with seeds from --seed on")
    what = "draws the plan (default: one for each run that is recorded)"
    parser.add_argument("--seed", type=harness.whole(0), metavar="N", help=what)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and report; with `--record`, together with all runs that were recorded."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing may stay, stopped for ever
    subprocess.run([sys.executable, "-m", "rhymeflow.workers.precompile"], cwd=ROOT, check=True)
    recorded = harness.RESULTS / RUNS
    runs = harness.lines(recorded, Attacked)
    first = len(runs) if args.seed is None else args.seed
    if not args.record:
        runs = []
    for seed in range(first, first + args.runs):
        runs.append(timed(seed, args.steps) if args.timed else dense(seed, args.faults))
        if args.record:
            harness.add_line(recorded, runs[-1])
    return harness.report("chaos", rows(runs), targets(runs), args, notes(runs))


def dense(seed: int, num_faults: int) -> Attacked:
    """One run with faults of every kind."""
    folder = Path(tempfile.mkdtemp(prefix="rhymeflow-chaos-"))
    setup = SETUPS[seed % len(SETUPS)]
    print(f"seed {seed} {setup}:", file=sys.stderr, flush=True)
    if not can_mount():
        print("  only root on Linux can mount a small disk: none is filled", file=sys.stderr)
    kinds = [*plan.PROCESSES, *[plan.DISK] * can_mount()]
    faults = plan.draw_dense(seed, num_faults, STEPS_APART, WORKER_TIMEOUT, kinds)
    max_steps = (num_faults + 1) * STEPS_APART
    small = SmallDisk(folder / "disk") if can_mount() else contextlib.nullcontext()
    with small as disk:
        run_dir = (disk.folder if disk else folder) / "run"
        found = run_with_faults(
            configuration(max_steps, run_dir, DENSE | setup), faults, disk, seed
        )
        if found.violations and disk:
            shutil.copytree(disk.folder, folder / "of-disk")
    finish(found, folder)
    return Attacked(seed, found, setup=setup)


def timed(seed: int, max_steps: int) -> Attacked:
    """One run with kills and one without; which is first changes from seed to seed."""
    folder = Path(tempfile.mkdtemp(prefix="rhymeflow-chaos-"))
    plans = {"attacked": plan.draw_rates(seed, MAX_SECONDS), "quiet": []}
    found: dict[str, Finished] = {}
    for side in sorted(plans, reverse=bool(seed % 2)):
        print(f"seed {seed}, {side}:", file=sys.stderr, flush=True)
        found[side] = run_with_faults(configuration(max_steps, folder / side), plans[side])
    attacked, quiet = found["attacked"], found["quiet"]
    attacked.violations += [f"without faults: {v}" for v in quiet.violations]
    finish(attacked, folder)
    return Attacked(seed, attacked, quiet.speed)


def finish(found: Finished, folder: Path) -> None:
    """Say what is wrong with a run, and keep it then."""
    for line in found.violations:
        print(f"  violation, see {folder}: {line}", file=sys.stderr, flush=True)
    if not found.violations:
        shutil.rmtree(folder)


def configuration(max_steps: int, run_dir: Path, changes: dict[str, str] | None = None) -> Config:
    fields = {"learner.max_steps": str(max_steps), "run.output_dir": str(run_dir)}
    return read_config("demo", {**SETTINGS, **fields, **(changes or {})})


def rows(runs: Sequence[Attacked]) -> list[dict[str, Any]]:
    labels = Counter(one.fault.label for each in runs for one in each.run.faults)
    found = []
    for label, count in sorted(labels.items()):
        row: dict[str, Any] = {"fault": label, "faults": count}
        if seconds := recoveries(runs, label):
            row |= {"timed alone": len(seconds), **harness.spread("median s", seconds, 2)}
        found.append(row)
    messages = sum((Counter(each.run.messages) for each in runs), Counter[str]())
    return found + [{"fault": f"message, {w}", "faults": n} for w, n in sorted(messages.items())]


def recoveries(runs: Sequence[Attacked], label: str) -> list[float]:
    """Seconds of the faults of this row that came alone, in timed runs."""
    return [
        one.recovery
        for each in runs
        if each.quiet_speed is not None
        for one in each.run.faults
        if one.fault.label == label and not one.is_again and one.recovery is not None
    ]


def targets(runs: Sequence[Attacked]) -> list[harness.Target]:
    violations = sum(len(each.run.violations) for each in runs)
    found = [harness.at_most("chaos/violations", violations, 0)]
    for label, most in RECOVERY.items():
        if seconds := recoveries(runs, label):
            median = statistics.median(seconds)
            name = f"chaos/recovery/{label.partition(',')[0]}"
            found.append(harness.at_most(name, median, most))
    if ratios := [each.run.speed / each.quiet_speed for each in runs if each.quiet_speed]:
        ratio = statistics.median(ratios)
        found.append(harness.Target("chaos/effective-time", ratio, EFFECTIVE))
    return found


def notes(runs: Sequence[Attacked]) -> str:
    faults = [one.fault for each in runs for one in each.run.faults]
    deaths = [f for f in faults if f.action == "killed" and f.kind in ("controller", "learner")]
    steps = sum(each.run.steps for each in runs)
    resumed = sum(each.run.resumed for each in runs)
    setups = Counter[str]()
    for each in runs:
        changes = [f"`{field}` {value}" for field, value in each.setup.items()]
        setups[" and ".join(changes) or "the demo as it is"] += len(each.run.faults)
    shares = ", ".join(f"{count} with {what}" for what, count in setups.items())
    return (
        f"{len(runs)} runs, {steps} steps, {len(faults)} faults, {len(deaths)} of them deaths of "
        f"the learner or the controller, {resumed} times resumed. Of the faults: {shares}. {NOTES}"
    )
