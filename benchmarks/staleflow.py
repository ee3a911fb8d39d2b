"""The setting StaleFlow was measured in, simulated: every schedule at its own best split.

The mind is the one that drives real runs; the cluster around it is simulated (docs/simulator.md)
with the profiles in `rhymeflow/profiles`. Assumed, and fixed before anything was run:

- batch of 128 groups of 16, prompts of 2,048 tokens, responses of up to 20,480 (the setting of
  arXiv 2601.12784, evaluation);
- lengths are lognormal with mean 5,000 after the cut-off and sigma 0.99, with which, before it, the
  99th percentile is ten times the median (the skew that Laminar, arXiv 2510.12633, reports for
  reasoning); 65% of the variance is the prompt's (RhymeRL, arXiv 2508.18588);
- costs: decoding as StaleFlow's authors fitted it; training, prefill and transfers derived from
  published hardware figures (docs/cost-model.md);
- `synchronous` runs on all devices in turn (colocated, as the systems it stands for), changing over
  for nothing but the transfer of weights; all others split the devices, and each is shown at the
  split where it is fastest, out of eighths;
- `routing_gain` of `staleflow` is the best of the published 0.2 to 0.3 and 0, as the split.

Ratios are of trained tokens per second. The published ones are of other systems (verl 0.5 and
others) on real devices: what is compared here is schedules, everything else being equal.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import harness
from rhymeflow import profiles, settings
from rhymeflow.config import Config
from rhymeflow.sim.simulate import run as simulate
from rhymeflow.sim.workload import workload

MODELS = {"14b": "qwen2.5-14b-h20", "32b": "qwen2.5-32b-h20", "30b-a3b": "qwen3-30b-a3b-h20"}
DEVICES = (64, 128)
BOUNDS = (1, 2, 3)
EIGHTHS = tuple(range(1, 8))
GAINS = ("0", "0.2", "0.3")
"""Values of `routing_gain` that are tried where routing is by waterfall."""

Overrides = dict[str, str]

SCHEDULES = ("synchronous", "one_step", "bounded", "partial", "staleflow")
FIXED = {"synchronous": 0, "one_step": 1}

LADDER: dict[str, Overrides] = {
    "bounded": {"schedule.name": "bounded"},
    "+ partial rollout": {"schedule.name": "partial"},
    "+ routing": {"schedule.name": "partial", "schedule.routing": "waterfall"},
    "+ moves at pulls": {"schedule.name": "staleflow", "schedule.migration": "none"},
    "+ migration (staleflow)": {"schedule.name": "staleflow"},
    "staleflow, status sync": {"schedule.name": "staleflow", "schedule.sync": "status"},
    "staleflow, 1 group more in 16": {"schedule.name": "staleflow", "schedule.extra_groups": "8"},
    "staleflow, 1 member more": {"schedule.name": "staleflow", "schedule.extra_generations": "1"},
}
"""The ablation, one thing at a time; the last three are each `staleflow` with one change."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--model", choices=list(MODELS), action="append", help="default: all")
    parser.add_argument("--devices", type=int, action="append", help="default: 64 and 128")
    parser.add_argument("--bound", type=int, action="append", help="default: 1, 2 and 3")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--mean-length", type=int, default=5000)
    parser.add_argument("--jobs", type=int, default=2, help="simulations at a time")
    parser.add_argument("--no-ablation", action="store_true")


@dataclass(frozen=True)
class Cell:
    """One figure to find: the best over what may be chosen freely."""

    name: str
    model: str
    devices: int
    bound: int
    overrides: Overrides = field(compare=False)

    @property
    def key(self) -> tuple[str, str, int, int]:
        """What tells it from others."""
        return self.name, self.model, self.devices, self.bound

    def tries(self) -> Iterable[Overrides]:
        """What may be chosen: the split, and how picky routing is."""
        if self.overrides["schedule.name"] == "synchronous":
            yield {"simulation.colocated": "true"}
            return
        waterfall = (
            self.overrides["schedule.name"] == "staleflow" or "schedule.routing" in self.overrides
        )
        each = profiles.load(MODELS[self.model]).devices_per_instance
        for eighths, gain in itertools.product(EIGHTHS, GAINS if waterfall else GAINS[:1]):
            rollout = self.devices * eighths // 8
            if rollout % each == 0:
                yield {
                    "simulation.rollout_devices": str(rollout),
                    "schedule.routing_gain": gain,
                }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Find every cell's figure and report."""
    cells = [
        Cell(name, model, devices, bound, {"schedule.name": name})
        for model in args.model or MODELS
        for devices in args.devices or DEVICES
        for name in SCHEDULES
        for bound in ([FIXED[name]] if name in FIXED else args.bound or BOUNDS)
    ]
    ablated = [] if args.no_ablation else [
        Cell(name, model, (args.devices or DEVICES)[0], bound, overrides)
        for model in args.model or MODELS
        for bound in (args.bound or BOUNDS)[:1]
        for name, overrides in LADDER.items()
    ]  # fmt: skip
    found = find([*cells, *ablated], args)
    rows = [row(cell, found) for cell in cells]
    rows += [{"table": "ablation", **row(cell, found)} for cell in ablated]
    return harness.report("staleflow", rows, targets(rows), args, notes=notes(args))


def notes(args: argparse.Namespace) -> str:
    """What the figures are."""
    return (
        f"Simulated, {args.steps} steps of which the first 3 are not counted; prompts of "
        f"{args.prompt_tokens} tokens, responses of {args.mean_length} on average, cut off "
        "at 20,480. Each figure is the best over splits in eighths (rollout devices) and, with "
        "waterfall routing, over routing_gain 0, 0.2 and 0.3. Published (other systems, real "
        "devices): up to 2.68x over synchronous and up to 1.42x over the strongest bounded "
        "asynchronous one. Assumptions: benchmarks/staleflow.py."
    )


def find(cells: Sequence[Cell], args: argparse.Namespace) -> dict[Cell, dict[str, Any]]:
    """Simulate all that is to be tried; the best of each cell."""
    jobs = [(cell, choice) for cell in cells for choice in cell.tries()]
    best: dict[Cell, dict[str, Any]] = {}
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        measured = pool.imap(functools.partial(measure, args=vars(args)), jobs)
        for number, ((cell, _), figures) in enumerate(zip(jobs, measured, strict=True), 1):
            if number % 20 == 0:
                print(f"  {number}/{len(jobs)}", file=sys.stderr, flush=True)
            if cell not in best or figures["tokens/s"] > best[cell]["tokens/s"]:
                best[cell] = figures
    return best


def measure(job: tuple[Cell, Overrides], args: dict[str, Any]) -> dict[str, Any]:
    """Simulate one choice."""
    cell, choice = job
    config = configure(cell, choice, args)
    result = simulate(config, workload(config, None))
    return {
        "rollout devices": int(choice.get("simulation.rollout_devices", cell.devices)),
        "routing gain": float(choice.get("schedule.routing_gain", 0)),
        "tokens/s": result.throughput,
        "idle rollout": round(result.idle_rollout, 3),
        "idle learner": round(result.idle_learner, 3),
        "mean staleness": round(
            sum(age * count for age, count in result.staleness.items())
            / sum(result.staleness.values()),
            2,
        ),
        "wasted": round(result.tokens_wasted / result.tokens_made, 3),
    }


def configure(cell: Cell, choice: Overrides, args: dict[str, Any]) -> Config:
    """The published setting, under one schedule and one choice."""
    return settings.load(
        "cluster",
        {
            "schedule.max_staleness": str(cell.bound),
            "schedule.cost_model": MODELS[cell.model],
            "simulation.num_devices": str(cell.devices),
            "simulation.rollout_devices": "null",
            "simulation.skip_steps": "3",
            "simulation.workload.mean_length": str(args["mean_length"]),
            "simulation.workload.sigma": "0.99",
            "simulation.workload.prompt_tokens": str(args["prompt_tokens"]),
            "learner.max_steps": str(args["steps"]),
            **cell.overrides,
            **choice,
        },
    )


def row(cell: Cell, found: dict[Cell, dict[str, Any]]) -> dict[str, Any]:
    """A table row, with the ratios to the baselines of the same model, devices and bound."""
    rate = found[cell]["tokens/s"]

    def over(name: str, bound: int) -> float | str:
        key = (name, cell.model, cell.devices, bound)
        rates = [f["tokens/s"] for other, f in found.items() if other.key == key]
        return round(rate / rates[0], 3) if rates else ""

    return {
        "schedule": cell.name,
        "model": cell.model,
        "devices": cell.devices,
        "bound": cell.bound,
        **found[cell],
        "over synchronous": over("synchronous", 0),
        "over one_step": over("one_step", 1),
        "over bounded": over("bounded", max(cell.bound, 1)),
        "over partial": over("partial", max(cell.bound, 1)),
    }


def targets(rows: Sequence[dict[str, Any]]) -> list[harness.Target]:
    """The published ratios."""
    ours = [r for r in rows if r["schedule"] == "staleflow" and "table" not in r]
    if not ours:
        return []
    strongest = [min(r["over bounded"], r["over partial"]) for r in ours]
    synchronous = [r["over synchronous"] for r in ours]
    return [
        harness.Target("staleflow/synchronous, greatest", max(synchronous), 2.68),
        harness.Target("staleflow/strongest bounded, greatest", max(strongest), 1.42),
        harness.Target("staleflow/strongest bounded, mean", statistics.mean(strongest), 1.17),
    ]
