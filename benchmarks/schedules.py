"""The schedules side by side: real runs of one recipe, or simulated clusters.

    rhymeflow bench schedules                      trained trajectories per second
    rhymeflow bench schedules --parts learning     time to a held-out reward; length bias
    rhymeflow bench schedules --simulated          the same coordinator on simulated clusters

With `--record`, each is a record of its own, and `schedules-side-by-side.png` is drawn anew from
those that there are.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks import harness, simulated_schedules
from benchmarks.charts import Bar, side_by_side
from benchmarks.real_schedules import learning, throughput
from benchmarks.real_schedules.sides import NAMES

PARTS = {"throughput": throughput, "learning": learning}
PICTURE = "schedules-side-by-side.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--schedule", choices=NAMES, action="append", help="default: all of them")
    parser.add_argument(
        "--bound",
        type=harness.not_negative,
        action="append",
        help="of those that leave it open; default: 1 and 3",
    )
    parser.add_argument("--simulated", action="store_true", help="simulate, instead of real runs")
    real = parser.add_argument_group("real runs")
    harness.add_parts_argument(real, PARTS, default="throughput")
    real.add_argument("--recipe", default="demo")
    real.add_argument("--instances", type=harness.positive, default=2)
    for part, module in PARTS.items():
        module.add_arguments(parser.add_argument_group(f"part {part}"))
    simulated_schedules.add_arguments(parser.add_argument_group("with --simulated"))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure what was asked for; the report of the last part."""
    if args.simulated:
        result = simulated_schedules.run(args)
    else:
        for part in harness.chosen_parts(args, PARTS):
            result = PARTS[part].run(args)
    if args.record:
        draw_recorded()
    return result


def draw_recorded() -> None:
    """Draw the records side by side, if there are any."""
    bars: list[Bar] = []
    for module in (simulated_schedules, learning):
        path = harness.RESULTS / f"{module.RECORD}.json"
        if path.exists():
            bars += module.bars(json.loads(path.read_text(encoding="utf-8"))["rows"])
    if bars:
        side_by_side(bars, harness.RESULTS / PICTURE)
