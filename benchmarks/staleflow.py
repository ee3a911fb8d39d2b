"""The setting StaleFlow was measured in, simulated: every schedule at its own best split.

The coordinator is the one that drives real runs; the cluster around it is simulated
(docs/simulator.md) with the profiles in `rhymeflow/profiles`. Assumed, and fixed before anything
was run:

- batch of 128 groups of 16, prompts of 2,048 tokens, responses of up to 20,480 (the setting of
  arXiv 2601.12784, evaluation);
- lengths are lognormal with mean 5,000 after the cut-off and sigma 0.99, with which, before it, the
  99th percentile is ten times the median (the skew that Laminar, arXiv 2510.12633, reports for
  reasoning); 65% of the variance is the prompt's (RhymeRL, arXiv 2508.18588);
- nothing is drafted, as in the systems compared with;
- costs: decoding as StaleFlow's authors fitted it; training, prefill and transfers derived from
  published hardware figures (docs/cost-model.md);
- `synchronous` runs on all devices in turn (colocated, as the systems it stands for), changing over
  for nothing but the transfer of weights; all others split the devices, and each is shown at the
  split where it is fastest: from 6/16 for rollout uphill in sixteenths
  (benchmarks/simulated/splits.py).

Ratios are of trained tokens per second. The published ones are of other systems (verl 0.5 and
others) on real devices: what is compared here is schedules, everything else being equal.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import harness
from benchmarks.simulated import splits
from rhymeflow.config import FIXED_BOUNDS

MODELS = {"14b": "qwen2.5-14b-h20", "32b": "qwen2.5-32b-h20", "30b-a3b": "qwen3-30b-a3b-h20"}
DEVICES = (64, 128)
BOUNDS = (1, 2, 3)
SKIPPED = 4
"""Steps at the beginning that are not counted: the first batches fill the buffers."""

Overrides = dict[str, str]

SCHEDULES = ("synchronous", "one_step", "bounded", "partial", "staleflow")
SHOWN = ("rollout devices", "tokens/s", "idle rollout", "idle learner", "mean staleness", "wasted")

LADDER: dict[str, Overrides] = {
    "bounded": {"schedule.name": "bounded"},
    "+ partial rollout": {"schedule.name": "partial"},
    "+ routing": {"schedule.name": "partial", "schedule.routing": "waterfall"},
    "+ moves at pulls": {
        "schedule.name": "staleflow",
        "schedule.migration": "none",
        "schedule.max_inflight_batches": "100",
    },
    "+ migration": {"schedule.name": "staleflow", "schedule.max_inflight_batches": "100"},
    "+ pace (staleflow)": {"schedule.name": "staleflow"},
    "staleflow, pace 1.5": {"schedule.name": "staleflow", "schedule.max_inflight_batches": "1.5"},
    "staleflow, sync status": {
        "schedule.name": "staleflow",
        "schedule.sync": "when_version_unusable",
    },
    "staleflow, gain 0.25": {"schedule.name": "staleflow", "schedule.routing_gain": "0.25"},
    "staleflow, kept caches": {
        "schedule.name": "staleflow",
        "schedule.on_pull": "keep",
        "rollout.kv_cache_on_pull": "keep",
    },
    "staleflow, 8 groups more": {"schedule.name": "staleflow", "schedule.extra_groups": "8"},
    "staleflow, 1 member more": {"schedule.name": "staleflow", "schedule.extra_generations": "1"},
}
"""The ablation: up to `staleflow` one thing more each, after it one thing changed each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--model", choices=list(MODELS), action="append", help="default: all")
    parser.add_argument(
        "--devices", type=harness.positive, action="append", help="default: 64 and 128"
    )
    parser.add_argument(
        "--bound", type=harness.not_negative, action="append", help="default: 1, 2 and 3"
    )
    parser.add_argument("--steps", type=harness.positive, default=20)
    parser.add_argument("--jobs", type=harness.positive, default=2, help="simulations at a time")


@dataclass(frozen=True)
class Cell:
    """One figure to find: the best over splits."""

    table: str
    name: str
    model: str
    devices: int
    bound: int
    prompt_tokens: int = 2048
    overrides: Overrides = field(default_factory=dict, compare=False)

    def baseline(self, name: str) -> Cell:
        """Another schedule in the same place."""
        bound = FIXED_BOUNDS.get(name, max(self.bound, 1))
        return Cell("schedules", name, self.model, self.devices, bound, self.prompt_tokens)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Find every cell's figure and report."""
    models, devices = args.model or list(MODELS), args.devices or list(DEVICES)
    bounds = args.bound or list(BOUNDS)
    cells = [
        Cell("schedules", name, model, number, bound, tokens, {"schedule.name": name})
        for model in models
        for number in devices
        # 2K is the setting's longest prompt; a short one shows what hangs on it.
        for tokens in ([2048, 256] if (model, number) == (models[0], devices[0]) else [2048])
        for name in SCHEDULES
        for bound in ([FIXED_BOUNDS[name]] if name in FIXED_BOUNDS else bounds)
    ]
    cells += [
        Cell("ablation", name, models[0], devices[0], bound, 2048, overrides)
        for bound in dict.fromkeys((bounds[0], bounds[-1]))
        for name, overrides in LADDER.items()
    ]
    found = find(cells, args)
    rows = [row(cell, found) for cell in cells]
    return harness.report("staleflow", rows, targets(rows), args, notes=notes(args))


def notes(args: argparse.Namespace) -> str:
    """What the figures are."""
    return (
        f"Simulated, {args.steps} steps of which the first {SKIPPED} are not counted. Each figure "
        "is at the split (rollout devices of all) where the schedule is fastest. Published, of "
        "other systems on real devices: up to 2.68x over synchronous, up to 1.42x over the "
        "strongest bounded asynchronous one. What is assumed stands in benchmarks/staleflow.py."
    )


def find(cells: Sequence[Cell], args: argparse.Namespace) -> dict[Cell, splits.Figures]:
    """The best figures of each cell."""
    cases = {cell: case(cell, args.steps) for cell in cells}
    found = splits.best(list(cases.values()), args.jobs)
    return {cell: found[one] for cell, one in cases.items()}


def case(cell: Cell, steps: int) -> splits.Case:
    """The published setting, under one schedule."""
    overrides = {
        "schedule.max_staleness": str(cell.bound),
        "schedule.cost_model": MODELS[cell.model],
        "simulation.skip_steps": str(SKIPPED),
        "simulation.workload.mean_length": "5000",
        "simulation.workload.sigma": "0.99",
        "simulation.workload.prompt_tokens": str(cell.prompt_tokens),
        "learner.max_steps": str(steps),
        "drafting.window": "off",
        **cell.overrides,
    }
    colocated = cell.name == "synchronous"
    return splits.case(cell.devices, overrides, colocated=colocated, parts=(16,))


def row(cell: Cell, found: Mapping[Cell, splits.Figures]) -> dict[str, Any]:
    """A table row, with the ratios to the baselines in the same place."""
    rate = found[cell]["tokens/s"]
    over = {
        f"over {name}": round(rate / found[cell.baseline(name)]["tokens/s"], 3)
        for name in SCHEDULES[:-1]
    }
    place = {
        "table": cell.table,
        "schedule": cell.name,
        "model": cell.model,
        "devices": cell.devices,
        "prompt": cell.prompt_tokens,
        "bound": cell.bound,
    }
    return {**place, **splits.shown(found[cell], *SHOWN), **over}


def targets(rows: Sequence[dict[str, Any]]) -> list[harness.Target]:
    """The published ratios: to synchronous, and to the strongest system without partial rollout.

    `partial` is no system that was compared with: it is our own first step towards `staleflow`.
    Its ratio is given a target of 1.
    """
    ours = [r for r in rows if r["schedule"] == "staleflow" and r["prompt"] == 2048]
    strongest = [min(r["over one_step"], r["over bounded"]) for r in ours]
    return [
        harness.Target("staleflow/synchronous", max(r["over synchronous"] for r in ours), 2.68),
        harness.Target("staleflow/best of one_step and bounded, greatest", max(strongest), 1.42),
        harness.Target(
            "staleflow/best of one_step and bounded, mean", statistics.mean(strongest), 1.17
        ),
        harness.Target(
            "staleflow/partial, mean", statistics.mean(r["over partial"] for r in ours), 1.0
        ),
    ]
