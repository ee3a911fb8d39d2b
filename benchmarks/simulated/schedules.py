"""Every schedule on the same simulated workloads: `rhymeflow bench schedules --simulated`.

`over synchronous` is over `synchronous` as published, without drafts; `over staleflow` is at the
same bound, and `over histopipe` at any bound above 0, that of `histopipe` being 1. README.md says
what is assumed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

from benchmarks import harness
from benchmarks.simulated import splits
from benchmarks.staleflow import setting
from rhymeflow.config import ScheduleConfig
from rhymeflow.utils.bounds import FIXED_BOUNDS

RECORD = "schedules-simulated"
NAMES: tuple[str, ...] = get_args(ScheduleConfig.model_fields["name"].annotation)
OURS, RIVALS = "rhymeflow", ("staleflow", "histopipe")
STEPS, EPOCH, UNCOUNTED = 12, splits.SKIPPED, 3
BATCH = 128
"""Groups."""
TAILS = {"short": "0.5", "long": "0.99"}
HISTORIES: dict[str, dict[str, str]] = {
    "informative": {},
    "shuffled": {"simulation.workload.epoch_correlation": "0"},
    "none": {"simulation.workload.prompt_variance_share": "0"},
}


class Cell(NamedTuple):
    """One figure to find. A cell and its baselines differ in schedule, bound and drafts only."""

    model: str
    devices: int
    prompt: int = 2048
    tail: str = "long"
    history: str = "informative"
    drafts: bool = True
    schedule: str = OURS
    bound: int = 1

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


_FEW = (*RIVALS, OURS)
_SMALL, _LARGE = Cell("14b", 64), Cell("30b-a3b", 128)
PLACES: tuple[tuple[Cell, tuple[str, ...], tuple[int, ...]], ...] = (
    (_SMALL, NAMES, (0, 1, 2, 3)),
    (_LARGE, _FEW, (1, 3)),
    (Cell("14b", 128), _FEW, (3,)),
    (_LARGE._replace(prompt=256), _FEW, (3,)),
    (_SMALL._replace(tail="short"), _FEW, (1, 3)),
    (_SMALL._replace(drafts=False), _FEW, (3,)),
    (_SMALL._replace(history="shuffled"), _FEW, (3,)),
    (_SMALL._replace(history="none"), _FEW, (3,)),
)
"""Schedules at bounds, on the workload of a cell."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    shown = splits.chosen(cells(), args.only)
    wanted = [*shown, *(base for cell in shown for base in cell.baselines().values())]
    rows = splits.table(wanted, case, args.jobs)
    both = over_better(rows)
    spread = both and (
        "With drafts and informative history, over the better of staleflow and histopipe: "
        f"{min(both):.3f} to {max(both):.3f} in {len(both)} cells. "
    )
    notes = splits.notes(STEPS, spread or "")
    return harness.report(RECORD, rows, targets(rows), args, notes)


def cells() -> list[Cell]:
    """All that is shown besides baselines."""
    return [
        place._replace(schedule=schedule, bound=bound)
        for place, schedules, bounds in PLACES
        for schedule in schedules
        for bound in splits.bounds_of(schedule, bounds)
    ]


def case(cell: Cell) -> splits.Case:
    settings = {
        **setting(cell),
        "drafting.window": "cost" if cell.drafts else "off",
        **splits.planned_every(1),
        "simulation.workload.sigma": TAILS[cell.tail],
        "simulation.workload.num_prompts": str(BATCH * EPOCH),
        **HISTORIES[cell.history],
    }
    return splits.case(cell.devices, settings, STEPS, uncounted=UNCOUNTED)


def over_better(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """`rhymeflow` over the better of its rivals, with drafts and informative history."""
    return [
        splits.over_better(r, RIVALS)
        for r in rows
        if r["schedule"] == OURS and r["bound"] and r["drafts"] and r["history"] == "informative"
    ]


def targets(rows: Sequence[Mapping[str, Any]]) -> list[harness.Target]:
    ours = [r for r in rows if r["schedule"] == OURS]
    published = [r for r in ours if r["tail"] == "long" and r["history"] == "informative"]
    most = [r["over synchronous"] for r in published]
    either = [r[f"over {name}"] for r in ours for name in RIVALS if f"over {name}" in r]
    useless = [r["over staleflow"] for r in ours if r["history"] != "informative"]
    best = "rhymeflow/best of staleflow and histopipe, mean"
    return splits.judged(
        ("rhymeflow/synchronous without drafts, greatest", max, most, 3.0),
        (best, statistics.mean, over_better(rows), 1.15),
        ("rhymeflow/either, least of all cells", min, either, 0.97),
        ("rhymeflow/staleflow, useless history, least", min, useless, 0.97),
    )
