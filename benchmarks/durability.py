"""What losing nothing costs: steps per second of the demo as it is, over those of one that forgets.

The other side is the same code with what durability needs taken out: tokens in flight are not
stored every second, commits are not flushed to the disk, the coordinator's state is not stored, and
there are no checkpoints but the last. Both are synchronous, so they train on the same tokens, and
have a core for rollout and one for training. Steps are counted from the fourth on. By default a
checkpoint comes after 120 seconds of training, which is more than such a run takes;
`--save-seconds` has them come sooner, to see what one costs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.training.train import IN_TURNS, published
from rhymeflow import cli
from rhymeflow.runtime import event_log
from rhymeflow.store.writer import SqliteTrajectoryStore

SIDES = ("as it is", "forgetful")
LEAST = 0.98
FIRST = 4
"""The step that is counted first: what comes before waits for code to be compiled or loaded."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    harness.add_number(parser, "--repeats", 7, "pairs of runs")
    harness.add_number(parser, "--steps", 24, "of each run")
    harness.add_number(parser, "--save-seconds", 120, "run.save_seconds of the demo as it is")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and report."""
    measured: dict[str, Callable[[], float]] = {s: partial(rate, s, args) for s in SIDES}
    values = harness.interleave(measured, args.repeats, "steps/s")
    rows = [harness.side_row(side, values[side], "steps/s") for side in SIDES]
    ratio = harness.median_ratio(*(values[side] for side in SIDES))
    targets = [harness.Target("durability/steps", ratio, LEAST)]
    ratios = [a / b for a, b in zip(*(values[side] for side in SIDES), strict=True)]
    notes = f"Pairs, in turn: {', '.join(f'{each:.3f}' for each in ratios)}."
    return harness.report("durability", rows, targets, args, notes=notes)


def rate(side: str, args: argparse.Namespace) -> float:
    """Steps per second of one run."""
    steps = args.steps
    with tempfile.TemporaryDirectory(prefix="rhymeflow-bench-") as folder:
        run_dir = Path(folder) / "run"
        fields = {**IN_TURNS, "learner.max_steps": steps, "run.output_dir": run_dir}
        fields["run.save_seconds"] = 0 if side == "forgetful" else args.save_seconds
        times = published(fields, command=("-m", "benchmarks.durability", side))
    assert len(times) == steps
    return (steps - FIRST) / (times[-1] - times[FIRST - 1])


def forget() -> None:
    """Take out of this process what durability needs."""
    event_log.COMMIT_SECONDS, event_log.SNAPSHOT_EVENTS = float("inf"), sys.maxsize
    event_log.EventLog.take_snapshot = lambda self: None  # type: ignore[method-assign]
    commit = SqliteTrajectoryStore.commit
    SqliteTrajectoryStore.commit = lambda self, **_: commit(self)  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1] == "forgetful":
        forget()
    sys.exit(cli.main(["train", "demo", *sys.argv[2:]]))
