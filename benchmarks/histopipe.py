"""The setting RhymeRL was measured in, simulated: pipeline, two tiers, drafts, one after another.

The coordinator is the one that drives real runs; the cluster around it is simulated
(docs/simulator.md). Published (arXiv 2508.18588; 128 Hopper GPUs, Qwen3-8B, Qwen3-14B,
Qwen2.5-32B, responses of up to 8K and 16K tokens): over a synchronous system 1.43x with the
pipeline, 1.56x with two tiers, 2.34x with drafts (14B, mathematics), 2.6x at most; rollout is 84 to
91% of a synchronous step and idle for more than 46% of its time; 2 to 6% of the responses are
migrated or postponed. Their batch and their lengths are not published. Assumed, and fixed before
schedules were compared:

- batch of 128 groups of 16, on 1,024 devices of 1,024 groups; prompts of 1,024 tokens;
- lengths are lognormal with a mean of a quarter of the longest and sigma 0.95, with which, before
  the cut-off, the 99th percentile is nine times the median; 65% of the variance is the prompt's
  (RhymeRL), and its level drifts by little from epoch to epoch (correlation 0.98);
- an epoch is four steps, so that there is history from the fifth on; the first four, and one at
  the end, are not counted;
- costs: profiles `*-h800`, derived, not measured (docs/cost-model.md);
- drafts are accepted as `simulation.acceptance` says, its default within what RhymeRL reports;
- `synchronous` alternates on all devices; the stages split them, each where it is fastest
  (benchmarks/simulated/splits.py); 1,024 devices have the split that was found for an eighth of
  them and of the batch.

The default takes less than ten minutes on two quiet cores.

Ratios are of trained tokens per second. What is compared is schedules, everything else being equal;
the published ratios are of systems.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.simulated import splits

MODELS = {"8b": "qwen3-8b-h800", "14b": "qwen3-14b-h800", "32b": "qwen2.5-32b-h800"}
LENGTHS = (8192, 16384)
DEVICES = (32, 64, 128)
EPOCH = 4
"""Steps of an epoch; those of the first are not counted."""
LARGE, PART = 1024, 8
"""Devices that no split is searched for on, but on one of so many parts; with as many groups."""
START = (12, 16)
"""Rollout is most of the work here."""

OFF, ON = {"drafting.window": "off"}, {"drafting.window": "cost"}
STAGES: dict[str, dict[str, str]] = {
    "synchronous": {"schedule.name": "synchronous", **OFF},
    "synchronous, drafts": {"schedule.name": "synchronous", **ON},
    "pipeline": {"schedule.name": "histopipe", "schedule.balance_instances": "false", **OFF},
    "+ two tiers": {"schedule.name": "histopipe", **OFF},
    "+ drafts": {"schedule.name": "histopipe", **ON},
}
"""From `pipeline` on each has one thing more."""

PUBLISHED = {"pipeline": 1.43, "+ two tiers": 1.56, "+ drafts": 2.34}
"""Over synchronous, of 14B and mathematics; taken to be 128 devices and 16K."""
GREATEST = 2.6
MOVED = 0.06


class Cell(NamedTuple):
    """One figure to find."""

    model: str
    length: int
    """Of the longest response, in tokens."""
    devices: int
    stage: str

    @property
    def part(self) -> Cell:
        """Where the split for this cell is searched."""
        return self._replace(devices=LARGE // PART) if self.devices == LARGE else self


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    splits.add_arguments(parser, MODELS, (*DEVICES, LARGE))
    splits.add_numbers(parser, "--length", "of the longest response", LENGTHS)
    harness.add_number(parser, "--steps", 12, "of which the first four are not counted")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Find the figures of every stage in every place and report."""
    wanted = cells(args)
    searched = {cell.part: case(cell.part, args.steps) for cell in wanted}
    found = splits.best(searched, args.jobs)
    large = [cell for cell in wanted if cell.part != cell]
    found |= splits.best({c: case(c, args.steps, found[c.part]) for c in large}, args.jobs)
    rows = [
        splits.row(cell, found, {"synchronous": cell._replace(stage="synchronous")})
        for cell in wanted
    ]
    return harness.report("histopipe", rows, targets(rows), args, notes=notes(args, rows))


def cells(args: argparse.Namespace) -> list[Cell]:
    """All stages in the places asked for; by default one of them is on 1,024 devices."""
    models, lengths = args.model or list(MODELS), args.length or list(LENGTHS)
    places = [
        (model, length, devices)
        for model in models
        for length in lengths
        for devices in args.devices or DEVICES
    ]
    if not args.devices:
        places.append(("14b" if "14b" in models else models[0], max(lengths), LARGE))
    return [Cell(*place, stage) for place in places for stage in STAGES]


def case(cell: Cell, steps: int, of_part: splits.Figures | None = None) -> splits.Case:
    """What is simulated; `of_part`: the figures whose split it takes."""
    is_large = of_part is not None
    groups = 128 * PART if is_large else 128
    overrides = {
        "schedule.cost_model": MODELS[cell.model],
        "rollout.max_completion_length": str(cell.length),
        "learner.groups_per_batch": str(groups),
        "simulation.skip_steps": str(EPOCH),
        "simulation.workload.mean_length": str(cell.length // 4),
        "simulation.workload.sigma": "0.95",
        "simulation.workload.prompt_tokens": "1024",
        "simulation.workload.num_prompts": str(EPOCH * groups),
        # Work grows with plans and snapshots; steps last minutes. Against a plan every 0.5 s the
        # rate changes by less than half a percent.
        "simulation.tick_seconds": "4" if is_large else "2",
        "simulation.snapshot_seconds": "20",
        **STAGES[cell.stage],
    }
    colocated = overrides["schedule.name"] == "synchronous"
    uncounted = 0 if colocated else 1
    steps = min(steps, 2 * EPOCH) if is_large else steps
    overrides["learner.max_steps"] = str(steps + uncounted)
    start = (of_part["rollout devices"], LARGE // PART) if of_part else START
    return splits.case(
        cell.devices,
        overrides,
        colocated=colocated,
        uncounted=uncounted,
        parts=() if is_large else (16, 32),
        start=start,
    )


def targets(rows: Sequence[Mapping[str, Any]]) -> list[harness.Target]:
    """The published steps where they were published, or else as the mean of the places asked for.

    The share of interrupted responses is of the last stage, as the mean of all places.
    """
    there = [r for r in rows if (r["model"], r["length"], r["devices"]) == ("14b", 16384, 128)]
    where = "14b, 16K, 128 devices" if there else "mean"
    found = [
        harness.Target(
            f"histopipe/{stage}/synchronous, {where}",
            statistics.mean(r["over synchronous"] for r in there or rows if r["stage"] == stage),
            published,
        )
        for stage, published in PUBLISHED.items()
    ]
    last = [r for r in rows if r["stage"] == "+ drafts"]
    most = max(r["over synchronous"] for r in last)
    moved = statistics.mean(r["interrupted"] for r in last)
    return [
        *found,
        harness.Target("histopipe/+ drafts/synchronous, greatest", most, GREATEST),
        harness.Target("histopipe/interrupted, mean", moved, MOVED, at_most=True),
    ]


def notes(args: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> str:
    """What the figures are, and how the assumed setting compares with the published one."""
    before = [r for r in rows if r["stage"] == "synchronous"]
    share, idle = ([r[name] for r in before] for name in ("rollout share", "idle in rollout"))
    return (
        f"Simulated, {args.steps} steps (1,024 devices: {2 * EPOCH} at most), of which the first "
        f"{EPOCH} are not counted. Each figure is at the split (rollout devices of all) where the "
        "stage is fastest. Synchronous rollout takes "
        f"{min(share):.0%} to {max(share):.0%} of a step here and is idle for {min(idle):.0%} to "
        f"{max(idle):.0%} of that (published: 84 to 91% and more than 46%). {splits.COLUMNS}"
        "A response is interrupted to be migrated or postponed. "
        "Assumptions: benchmarks/histopipe.py."
    )
