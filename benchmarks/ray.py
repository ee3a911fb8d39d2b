"""Steps per second of the demo on Ray over those of processes, on the same cores.

Each side is a run of its own (`rhymeflow train`), in turn. Its seconds are those between its first
version and its last, by the run's clock: what starting takes, where each of Ray's processes imports
for itself, is a column.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.training.train import published

SIDES = ("ray", "local")
LEAST = 0.9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    harness.add_number(parser, "--repeats", 3, "pairs of runs")
    harness.add_number(parser, "--steps", 10, "of each run")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and report."""
    started: dict[str, list[float]] = {side: [] for side in SIDES}

    def measure(side: str) -> Callable[[], float]:
        def once() -> float:
            first, last = trained(side, args.steps)
            started[side].append(first)
            return (args.steps - 1) / (last - first)

        return once

    values = harness.interleave({side: measure(side) for side in SIDES}, args.repeats, "steps/s")
    rows = []
    for side in SIDES:
        row = harness.side_row(side, values[side], "steps/s")
        rows.append({**row, **harness.spread("s to version 1", started[side], 1)})
    ratio = harness.median_ratio(values["ray"], values["local"])
    return harness.report("ray", rows, [harness.Target("ray/steps", ratio, LEAST)], args)


def trained(side: str, steps: int) -> tuple[float, float]:
    """Seconds from a run's beginning to its first version, and to its last."""
    with tempfile.TemporaryDirectory(prefix="rhymeflow-bench-") as folder:
        run_dir = Path(folder) / "run"
        fields = {"learner.max_steps": steps, "run.output_dir": run_dir, "run.eval_steps": 0}
        times = published({"runtime": side, **fields})
    assert len(times) == steps
    return times[0], times[-1]
