"""The setting RhymeRL was measured in, simulated: two tiers, then drafts.

Ratios are of trained tokens per second, and of schedules, everything else being equal; the
published ratios (arXiv 2508.18588) are of systems. README.md says what is assumed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.simulated import splits

MODELS = {"8b": "qwen3-8b-h800", "14b": "qwen3-14b-h800", "32b": "qwen2.5-32b-h800"}
LENGTHS = (8192, 16384)
DEVICES = (32, 64, 128)
BATCH, STEPS = 128, 12
EPOCH = splits.SKIPPED
"""Steps of an epoch."""
OFF, ON = {"drafting.window": "off"}, {"drafting.window": "cost"}
STAGES: dict[str, dict[str, str]] = {
    "synchronous": {"schedule.name": "synchronous", **OFF},
    "synchronous, drafts": {"schedule.name": "synchronous", **ON},
    "+ two tiers": {"schedule.name": "histopipe", **OFF},
    "+ drafts": {"schedule.name": "histopipe", **ON},
}
"""The published first stage, a pipeline of one tier, is not among them."""

PUBLISHED = {"+ two tiers": 1.56, "+ drafts": 2.34}
"""Over synchronous, of 14B and mathematics; taken to be 128 devices and 16K."""
GREATEST, MOVED = 2.6, 0.06
ROLLOUT = (
    "Published: rollout is 84 to 91% of a synchronous step and idle for more than 46% of that. A "
    "response is interrupted to be migrated or postponed. "
)


class Cell(NamedTuple):
    model: str
    length: int
    """Of the longest response, in tokens."""
    devices: int
    stage: str

    def baselines(self) -> dict[str, Cell]:
        return {"synchronous": self._replace(stage="synchronous")}


add_arguments = splits.add_arguments


def run(args: argparse.Namespace) -> dict[str, Any]:
    rows = splits.table(splits.chosen(cells(), args.only), case, args.jobs)
    notes = splits.notes(STEPS, ROLLOUT)
    return harness.report("histopipe", rows, targets(rows), args, notes)


def cells() -> list[Cell]:
    return [Cell(*each) for each in itertools.product(MODELS, LENGTHS, DEVICES, STAGES)]


def case(cell: Cell) -> splits.Case:
    settings = {
        "schedule.cost_model": MODELS[cell.model],
        "rollout.max_completion_length": str(cell.length),
        "learner.groups_per_batch": str(BATCH),
        "simulation.workload.mean_length": str(cell.length // 4),
        "simulation.workload.sigma": "0.95",
        "simulation.workload.prompt_tokens": "1024",
        "simulation.workload.num_prompts": str(EPOCH * BATCH),
        # Against a plan every 0.5 s the rate changes by less than half a percent.
        **splits.planned_every(2),
        **STAGES[cell.stage],
    }
    return splits.case(cell.devices, settings, STEPS, uncounted=1, parts=(16, 32))


def targets(rows: Sequence[Mapping[str, Any]]) -> list[harness.Target]:
    """The published steps where they were published, or else as the mean of the places asked for.

    The share of interrupted responses is of the last stage, as the mean of all places.
    """
    there = [r for r in rows if (r["model"], r["length"], r["devices"]) == ("14b", 16384, 128)]
    where = "14b, 16K, 128 devices" if there else "mean"
    over = {
        stage: [r["over synchronous"] for r in there or rows if r["stage"] == stage]
        for stage in PUBLISHED
    }
    last = [r for r in rows if r["stage"] == "+ drafts"]
    most = [r["over synchronous"] for r in last]
    found = splits.judged(
        *(
            (f"histopipe/{stage}/synchronous, {where}", statistics.mean, over[stage], published)
            for stage, published in PUBLISHED.items()
        ),
        ("histopipe/+ drafts/synchronous, greatest", max, most, GREATEST),
    )
    if last:
        moved = statistics.mean(r["interrupted"] for r in last)
        found.append(harness.at_most("histopipe/interrupted, mean", moved, MOVED))
    return found
