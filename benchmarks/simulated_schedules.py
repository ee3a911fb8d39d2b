"""Every schedule on the same simulated workloads: tails, bounds, drafts, true and useless history.

The setting is the one StaleFlow was measured in, with what is assumed of it in
benchmarks/staleflow.py (128 groups of 16, prompts of 2,048 tokens, responses of up to 20,480 with a
mean of 5,000, H20s), but for the epochs: one is four steps here, so that from the fifth step on
every prompt was answered before. Fixed before anything was run:

- the first epoch is not counted, nor are the last three steps, ahead of which nothing runs;
- long tail: sigma 0.99; short tail: sigma 0.5, the same mean;
- history is informative (65% of the variance of lengths is the prompt's, whose level keeps a
  correlation of 0.98 from epoch to epoch), shuffled (a correlation of 0: an epoch says nothing
  about the next) or none (the prompt explains nothing);
- with drafts, they are accepted as `simulation.acceptance` says, whatever is known of lengths;
- at a bound of 0 all devices take turns, as for `synchronous`; else each schedule has the split
  where it is fastest (benchmarks/simulated/splits.py);
- `synchronous` is what was published of it: without drafts. `over synchronous, drafts` has them.

Ratios are of trained tokens per second. `at most` is the ratio to `synchronous` that a schedule
would have for which rollout took nothing and all devices trained all the time. `over staleflow` is
at the same bound, both with drafts or both without, and `over histopipe` is at any bound above 0,
that of `histopipe` being 1.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from benchmarks import harness
from benchmarks.simulated import splits
from rhymeflow.config import FIXED_BOUNDS, ScheduleConfig

NAMES: tuple[str, ...] = get_args(ScheduleConfig.model_fields["name"].annotation)
OURS = "rhymeflow"
MODELS = {"14b": "qwen2.5-14b-h20", "30b-a3b": "qwen3-30b-a3b-h20", "32b": "qwen2.5-32b-h20"}
DEVICES = (64, 128)
PLACES = (("14b", 64), ("30b-a3b", 128))
"""Those of the default subset."""
EPOCH, UNCOUNTED = 4, 3

TAILS = {"short": "0.5", "long": "0.99"}
HISTORIES: dict[str, dict[str, str]] = {
    "informative": {},
    "shuffled": {"simulation.workload.epoch_correlation": "0"},
    "none": {"simulation.workload.prompt_variance_share": "0"},
}
WINDOWS = {True: "cost", False: "off"}

SHOWN = (
    "rollout devices",
    "tokens/s",
    "idle rollout",
    "idle learner",
    "idle devices",
    "interrupted",
    "mean staleness",
    "greatest staleness",
    "wasted",
)


class Cell(NamedTuple):
    """One figure to find."""

    model: str
    devices: int
    tail: str
    history: str
    drafts: bool
    schedule: str
    bound: int

    def other(self, schedule: str, drafts: bool | None = None) -> Cell:
        """Another schedule in the same place, at the same bound where it leaves it open."""
        return self._replace(
            schedule=schedule,
            bound=FIXED_BOUNDS.get(schedule, self.bound),
            drafts=self.drafts if drafts is None else drafts,
        )


class Workload(NamedTuple):
    """What the schedules are compared on, and which of them at which bounds."""

    tail: str
    history: str
    drafts: bool
    schedules: tuple[str, ...]
    bounds: tuple[int, ...]


_FEW = ("staleflow", "histopipe", OURS)
SUBSET = (
    Workload("long", "informative", True, NAMES, (0, 1, 3)),
    Workload("long", "informative", False, NAMES, (3,)),
    Workload("short", "informative", True, _FEW, (1, 3)),
    Workload("long", "shuffled", True, _FEW, (1, 3)),
    Workload("long", "none", True, _FEW, (1, 3)),
)
"""The default: all schedules where history tells something, the new ones with their rivals else."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--full", action="store_true", help="all models and workloads; hours")
    parser.add_argument("--model", choices=list(MODELS), action="append", help="of these only")
    parser.add_argument("--devices", type=int, action="append", help="so many only")
    parser.add_argument("--schedule", choices=NAMES, action="append", help="of these only")
    parser.add_argument("--bound", type=int, action="append", help="of these only")
    parser.add_argument("--steps", type=int, default=12, help="the first four are not counted")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Find every cell's figures and report."""
    shown = list(cells(args))
    wanted = dict.fromkeys([*shown, *(base for cell in shown for base in baselines(cell))])
    cases = {cell: case(cell, args.steps) for cell in wanted}
    measured = splits.best(list(cases.values()), args.jobs)
    found = {cell: measured[one] for cell, one in cases.items()}
    rows = [row(cell, found) for cell in wanted]
    name = "simulated_schedules-full" if args.full else "simulated_schedules"
    return harness.report(name, rows, targets(rows), args, notes=notes(args, rows))


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """Those asked for."""
    for model, devices in places(args):
        for load in workloads(args):
            for schedule in args.schedule or load.schedules:
                fixed = FIXED_BOUNDS.get(schedule)
                for bound in load.bounds if fixed is None else (fixed,):
                    yield Cell(
                        model, devices, load.tail, load.history, load.drafts, schedule, bound
                    )


def places(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Models and numbers of devices."""
    if args.full or args.model or args.devices:
        return [
            (model, devices)
            for model in args.model or list(MODELS)
            for devices in args.devices or DEVICES
        ]
    return list(PLACES)


def workloads(args: argparse.Namespace) -> list[Workload]:
    """The subset, or all of them."""
    found: Iterable[Workload] = SUBSET
    if args.full:
        found = [
            Workload(tail, history, drafts, NAMES, (0, 1, 2, 3))
            for tail in ("long", "short")
            for history in HISTORIES
            for drafts in (True, False)
        ]
    return [load._replace(bounds=tuple(args.bound or load.bounds)) for load in found]


def baselines(cell: Cell) -> list[Cell]:
    """What a cell is compared with."""
    found = [cell.other("synchronous", drafts) for drafts in (False, True)]
    return [*found, *rivals(cell)]


def rivals(cell: Cell) -> list[Cell]:
    """The schedules that `rhymeflow` unites, in the same place; of a laxer bound, none."""
    if cell.schedule != OURS:
        return []
    found = [cell.other("staleflow"), cell.other("histopipe")]
    return [other for other in found if other.bound <= cell.bound]


def case(cell: Cell, steps: int) -> splits.Case:
    """What is simulated."""
    overrides = {
        "schedule.name": cell.schedule,
        "schedule.max_staleness": str(cell.bound),
        "schedule.cost_model": MODELS[cell.model],
        "drafting.window": WINDOWS[cell.drafts],
        "learner.max_steps": str(steps + (UNCOUNTED if cell.bound else 0)),
        "simulation.skip_steps": str(EPOCH),
        # Work grows with plans and snapshots; steps last minutes.
        "simulation.tick_seconds": "1",
        "simulation.snapshot_seconds": "10",
        "simulation.workload.mean_length": "5000",
        "simulation.workload.sigma": TAILS[cell.tail],
        "simulation.workload.prompt_tokens": "2048",
        "simulation.workload.num_prompts": str(128 * EPOCH),
        **HISTORIES[cell.history],
    }
    colocated = cell.bound == 0
    uncounted = UNCOUNTED if cell.bound else 0
    return splits.case(cell.devices, overrides, colocated=colocated, uncounted=uncounted)


def row(cell: Cell, found: Mapping[Cell, splits.Figures]) -> dict[str, Any]:
    """A table row, with the ratios to what it is compared with."""
    rate = found[cell]["tokens/s"]
    in_turn = found[cell.other("synchronous", False)]
    ratios = {
        "over synchronous": rate / in_turn["tokens/s"],
        "at most": 1 / (1 - in_turn["idle learner"]),
        "over synchronous, drafts": rate / found[cell.other("synchronous", True)]["tokens/s"],
        **{f"over {other.schedule}": rate / found[other]["tokens/s"] for other in rivals(cell)},
    }
    return {
        **cell._asdict(),
        **splits.shown(found[cell], *SHOWN),
        **{name: round(ratio, 3) for name, ratio in ratios.items()},
    }


def over_better(one: Mapping[str, Any]) -> float:
    """A row's ratio to the better of `staleflow` and `histopipe`."""
    return float(min(one[f"over {name}"] for name in ("staleflow", "histopipe")))


def contested(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of `rhymeflow` where both rivals are there, with drafts and informative history."""
    return [
        r
        for r in rows
        if r["schedule"] == OURS
        and r["bound"] > 0
        and r["drafts"]
        and r["history"] == "informative"
    ]


def targets(rows: Sequence[Mapping[str, Any]]) -> list[harness.Target]:
    """The targets of `rhymeflow`; those for which the rows are not there are left out."""
    ours = [r for r in rows if r["schedule"] == OURS]
    published = [r for r in ours if r["tail"] == "long" and r["history"] == "informative"]
    least = [r[name] for r in ours for name in ("over staleflow", "over histopipe") if name in r]
    useless = [r["over staleflow"] for r in ours if r["history"] != "informative"]
    both = [over_better(r) for r in contested(rows)]
    found = []
    if published:
        most = max(r["over synchronous"] for r in published)
        found.append(harness.Target("rhymeflow/synchronous without drafts, greatest", most, 3.0))
    if both:
        mean = statistics.mean(both)
        found.append(harness.Target("rhymeflow/best of staleflow and histopipe, mean", mean, 1.15))
    if least:
        found.append(harness.Target("rhymeflow/either, least of all cells", min(least), 0.97))
    if useless:
        name = "rhymeflow/staleflow, useless history, least"
        found.append(harness.Target(name, min(useless), 0.97))
    return found


def notes(args: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> str:
    """What the figures are, and how far the contested cells are apart."""
    both = [over_better(r) for r in contested(rows)]
    spread = (
        f"With drafts and informative history, over the better of staleflow and histopipe: "
        f"{min(both):.3f} to {max(both):.3f} in {len(both)} cells. "
        if both
        else ""
    )
    return (
        f"Simulated, {args.steps} counted steps less the first {EPOCH}. {spread}Each figure is at "
        "the split (rollout devices of all) where the schedule is fastest. What is assumed stands "
        "in benchmarks/simulated_schedules.py."
    )
