"""The cells of the simulated schedules: a schedule at a bound, on a model, devices and a workload.

Holds true: a cell and its baselines differ in schedule, bound and drafts only. What is assumed of
workloads, and why, stands in benchmarks/simulated_schedules.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import NamedTuple, get_args

from benchmarks.simulated import splits
from rhymeflow.config import FIXED_BOUNDS, ScheduleConfig

NAMES: tuple[str, ...] = get_args(ScheduleConfig.model_fields["name"].annotation)
OURS = "rhymeflow"
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
WINDOWS = {True: "cost", False: "off"}
PROMPTS = (2048, 256)
"""Tokens: the limit that was published, and about what the prompts of DAPO-Math have."""


class Workload(NamedTuple):
    """What schedules are compared on."""

    tail: str = "long"
    history: str = "informative"
    drafts: bool = True
    prompt: int = PROMPTS[0]


class Cell(NamedTuple):
    """One figure to find."""

    model: str
    devices: int
    prompt: int
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


class Part(NamedTuple):
    """Part of the default: schedules at bounds, in places, on workloads."""

    places: tuple[tuple[str, int], ...]
    loads: tuple[Workload, ...]
    schedules: tuple[str, ...]
    bounds: tuple[int, ...]


_FEW = ("staleflow", "histopipe", OURS)
_SMALL, _MIDDLE, _LARGE = ("14b", 64), ("14b", 128), ("30b-a3b", 128)
SUBSET = (
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
"""The default: all schedules in one place, in others the new ones with their rivals."""


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """Those asked for, each once."""
    found: dict[Cell, None] = {}
    for part in parts(args):
        for model, devices in part.places:
            for load in part.loads:
                for schedule, bound in schedules(args, part):
                    cell = Cell(
                        model, devices, load.prompt, load.tail, load.history, load.drafts,
                        schedule, bound,
                    )  # fmt: skip
                    found[cell] = None
    yield from found


def parts(args: argparse.Namespace) -> Iterable[Part]:
    """The default or all, in the places asked for."""
    asked = tuple(
        (model, devices) for model in args.model or MODELS for devices in args.devices or DEVICES
    )
    if args.full:
        loads = tuple(
            Workload(tail, history, drafts, prompt)
            for prompt in PROMPTS
            for tail in ("long", "short")
            for history in HISTORIES
            for drafts in (True, False)
        )
        return [Part(asked, loads, NAMES, (0, 1, 2, 3))]
    if args.model or args.devices:
        loads = tuple(dict.fromkeys(load for part in SUBSET for load in part.loads))
        return [Part(asked, loads, _FEW, (1, 3))]
    return SUBSET


def schedules(args: argparse.Namespace, part: Part) -> Iterator[tuple[str, int]]:
    """Schedules and bounds of a part, or those asked for."""
    for schedule in args.schedule or part.schedules:
        fixed = FIXED_BOUNDS.get(schedule)
        for bound in args.bound or part.bounds if fixed is None else (fixed,):
            yield schedule, bound


def baselines(cell: Cell) -> list[Cell]:
    """What a cell is compared with."""
    return [*(cell.other("synchronous", drafts) for drafts in (False, True)), *rivals(cell)]


def rivals(cell: Cell) -> list[Cell]:
    """The schedules that `rhymeflow` unites, in the same place; of a laxer bound, none."""
    if cell.schedule != OURS:
        return []
    found = [cell.other("staleflow"), cell.other("histopipe")]
    return [other for other in found if other.bound <= cell.bound]


def case(cell: Cell, steps: int) -> splits.Case:
    """What is simulated."""
    colocated = cell.bound == 0
    uncounted = 0 if colocated else UNCOUNTED
    overrides = {
        "schedule.name": cell.schedule,
        "schedule.max_staleness": str(cell.bound),
        "schedule.cost_model": MODELS[cell.model],
        "drafting.window": WINDOWS[cell.drafts],
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
    return splits.case(
        cell.devices, overrides, colocated=colocated, uncounted=uncounted, parts=(16,)
    )
