"""Every schedule on the same simulated workloads: `rhymeflow bench schedules --simulated`.

The setting is the one StaleFlow was measured in, with the assumptions of benchmarks/staleflow.py
(128 groups of 16, prompts of 2,048 tokens, responses of up to 20,480 with a mean of 5,000, H20s),
except that an epoch is four steps, so that from the fifth step on every prompt was answered before.
Fixed before anything was run:

- the first epoch is not counted, nor are the last three steps, ahead of which nothing runs;
- long tail: sigma 0.99; short tail: sigma 0.5, the same mean;
- history is informative (the prompt explains 65% of the variance of lengths, and its level keeps a
  correlation of 0.98 from epoch to epoch), shuffled (a correlation of 0: an epoch says nothing
  about the next) or none (the prompt explains nothing);
- with drafts, they are accepted as `simulation.acceptance` says, however predictable lengths are;
- at a bound of 0 all devices alternate, as for `synchronous`; else each schedule has the split, in
  sixteenths, where it is fastest (benchmarks/simulated/splits.py);
- the coordinator plans once a second;
- `over synchronous` is over `synchronous` as published, without drafts; `over synchronous, drafts`
  is over the same with drafts.

The published setting gives 2,048 as the limit of a prompt. The prompts of DAPO-Math, the dataset it
names, are mostly short, so prompts of 256 tokens stand beside those of 2,048 in one place. The
greatest ratio to `synchronous` is over both.

The default takes less than ten minutes on two quiet cores: all schedules in one place, in the
others `rhymeflow` and the two it is compared with.

Ratios are of trained tokens per second. `over staleflow` is at the same bound, and `over histopipe`
at any bound above 0, that of `histopipe` being 1.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from benchmarks import harness
from benchmarks.simulated import splits
from rhymeflow.config import FIXED_BOUNDS, ScheduleConfig

RECORD = "schedules-simulated"
NAMES: tuple[str, ...] = get_args(ScheduleConfig.model_fields["name"].annotation)
OURS, RIVALS = "rhymeflow", ("staleflow", "histopipe")
MODELS = {"14b": "qwen2.5-14b-h20", "30b-a3b": "qwen3-30b-a3b-h20", "32b": "qwen2.5-32b-h20"}
DEVICES = (64, 128)
EPOCH, UNCOUNTED = 4, 3
BATCH = 128
"""Groups."""
TAILS = {"short": "0.5", "long": "0.99"}
HISTORIES: dict[str, dict[str, str]] = {
    "informative": {},
    "shuffled": {"simulation.workload.epoch_correlation": "0"},
    "none": {"simulation.workload.prompt_variance_share": "0"},
}


class Workload(NamedTuple):
    """What schedules are compared on."""

    tail: str = "long"
    history: str = "informative"
    drafts: bool = True
    prompt: int = 2048


class Cell(NamedTuple):
    """One figure to find. A cell and its baselines differ in schedule, bound and drafts only."""

    model: str
    devices: int
    prompt: int
    tail: str
    history: str
    drafts: bool
    schedule: str
    bound: int

    def other(self, schedule: str, drafts: bool | None = None) -> Cell:
        """Another schedule in the same place, at the same bound unless it fixes its own."""
        return self._replace(
            schedule=schedule,
            bound=FIXED_BOUNDS.get(schedule, self.bound),
            drafts=self.drafts if drafts is None else drafts,
        )

    def baselines(self) -> dict[str, Cell]:
        """What it is compared with: `rhymeflow` also with its rivals, none at a looser bound."""
        rivals = map(self.other, RIVALS if self.schedule == OURS else ())
        return {
            "synchronous": self.other("synchronous", False),
            "synchronous, drafts": self.other("synchronous", True),
            **{other.schedule: other for other in rivals if other.bound <= self.bound},
        }


class Part(NamedTuple):
    """Schedules at bounds, in places, on workloads."""

    places: tuple[tuple[str, int], ...]
    loads: tuple[Workload, ...]
    schedules: tuple[str, ...]
    bounds: tuple[int, ...]


_FEW = (*RIVALS, OURS)
_SMALL, _MIDDLE, _LARGE = ("14b", 64), ("14b", 128), ("30b-a3b", 128)
DEFAULT = (
    Part((_SMALL,), (Workload(),), NAMES, (0, 1, 2, 3)),
    Part((_LARGE,), (Workload(),), _FEW, (1, 3)),
    Part((_MIDDLE,), (Workload(),), _FEW, (3,)),
    Part((_LARGE,), (Workload(prompt=256),), _FEW, (3,)),
    Part((_SMALL,), (Workload("short"),), _FEW, (1, 3)),
    Part(
        (_SMALL,),
        (Workload(drafts=False), Workload(history="shuffled"), Workload(history="none")),
        _FEW,
        (3,),
    ),
)


def add_arguments(parser: Any) -> None:
    """Add the options of `--simulated`; `--schedule` and `--bound` are shared with real runs."""
    splits.add_arguments(parser, MODELS, DEVICES)
    harness.add_number(parser, "--simulated-steps", 12, "of which the first four are not counted")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Find every cell's figures and report."""
    shown = dict.fromkeys(cells(args))
    wanted = [*shown, *(base for cell in shown for base in cell.baselines().values())]
    steps = args.simulated_steps
    rows = splits.table(wanted, lambda cell: case(cell, steps), Cell.baselines, args.jobs)
    return harness.report(RECORD, rows, targets(rows), args, notes=notes(args, rows))


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """Those asked for; a cell may come twice."""
    for part in parts(args):
        for model, devices in part.places:
            for load in part.loads:
                for schedule in args.schedule or part.schedules:
                    for bound in splits.bounds_of(schedule, args.bound or part.bounds):
                        yield Cell(
                            model, devices, load.prompt, load.tail, load.history, load.drafts,
                            schedule, bound,
                        )  # fmt: skip


def parts(args: argparse.Namespace) -> Iterable[Part]:
    """The default, or all its workloads in the places asked for."""
    if not (args.model or args.devices):
        return DEFAULT
    places = tuple(
        (model, devices) for model in args.model or MODELS for devices in args.devices or DEVICES
    )
    loads = tuple(dict.fromkeys(load for part in DEFAULT for load in part.loads))
    return [Part(places, loads, _FEW, (1, 3))]


def case(cell: Cell, steps: int) -> splits.Case:
    """What is simulated."""
    colocated = cell.bound == 0
    uncounted = 0 if colocated else UNCOUNTED
    overrides = {
        "schedule.name": cell.schedule,
        "schedule.max_staleness": str(cell.bound),
        "schedule.cost_model": MODELS[cell.model],
        "drafting.window": "cost" if cell.drafts else "off",
        "learner.max_steps": str(steps + uncounted),
        "simulation.skip_steps": str(EPOCH),
        # Work grows with plans and snapshots; steps last minutes.
        "simulation.tick_seconds": "1",
        "simulation.snapshot_seconds": "10",
        "simulation.workload.mean_length": "5000",
        "simulation.workload.sigma": TAILS[cell.tail],
        "simulation.workload.prompt_tokens": str(cell.prompt),
        "simulation.workload.num_prompts": str(BATCH * EPOCH),
        **HISTORIES[cell.history],
    }
    return splits.case(cell.devices, overrides, colocated=colocated, uncounted=uncounted)


def over_better(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """`rhymeflow` over the better of its rivals, with drafts and informative history."""
    return [
        splits.over_better(r, RIVALS)
        for r in rows
        if r["schedule"] == OURS and r["bound"] and r["drafts"] and r["history"] == "informative"
    ]


def targets(rows: Sequence[Mapping[str, Any]]) -> list[harness.Target]:
    """The targets of `rhymeflow`; those whose rows were not asked for are left out."""
    ours = [r for r in rows if r["schedule"] == OURS]
    published = [r for r in ours if r["tail"] == "long" and r["history"] == "informative"]
    both = over_better(rows)
    either = [r[f"over {name}"] for r in ours for name in RIVALS if f"over {name}" in r]
    useless = [r["over staleflow"] for r in ours if r["history"] != "informative"]
    found = []
    if published:
        most = max(r["over synchronous"] for r in published)
        found.append(harness.Target("rhymeflow/synchronous without drafts, greatest", most, 3.0))
    if both:
        mean = statistics.mean(both)
        found.append(harness.Target("rhymeflow/best of staleflow and histopipe, mean", mean, 1.15))
    if either:
        found.append(harness.Target("rhymeflow/either, least of all cells", min(either), 0.97))
    if useless:
        name = "rhymeflow/staleflow, useless history, least"
        found.append(harness.Target(name, min(useless), 0.97))
    return found


def notes(args: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> str:
    """What the figures are, and the range of ratios to the better rival."""
    both = over_better(rows)
    spread = (
        f"With drafts and informative history, over the better of staleflow and histopipe: "
        f"{min(both):.3f} to {max(both):.3f} in {len(both)} cells. "
        if both
        else ""
    )
    return (
        f"Simulated, {args.simulated_steps} steps, of which the first {EPOCH} are not counted. "
        f"{spread}Each figure is at the split (rollout devices of all) where the schedule is "
        f"fastest. {splits.COLUMNS}Assumptions: benchmarks/simulated/schedules.py."
    )
