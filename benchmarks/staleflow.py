"""The setting StaleFlow was measured in, simulated: every schedule at its own best split.

Ratios are of trained tokens per second, and of schedules, everything else being equal; the
published ratios are of other systems (verl 0.5 and others) on real devices. README.md says what is
assumed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.simulated import splits
from rhymeflow.utils.bounds import FIXED_BOUNDS

MODELS = {"14b": "qwen2.5-14b-h20", "32b": "qwen2.5-32b-h20", "30b-a3b": "qwen3-30b-a3b-h20"}
DEVICES = (64, 128)
BOUNDS = (1, 2, 3)
SCHEDULES = ("synchronous", "one_step", "bounded", "partial", "staleflow")
STEPS = 20
PUBLISHED = (
    "Published, of other systems on real devices: up to 2.68x over synchronous, up to 1.42x over "
    "the strongest bounded asynchronous one. "
)


class Cell(NamedTuple):
    schedule: str
    model: str
    devices: int
    prompt: int
    bound: int

    def baselines(self) -> dict[str, Cell]:
        """The other schedules in the same place, at the same bound unless they fix theirs."""
        return {
            name: self._replace(schedule=name, bound=FIXED_BOUNDS.get(name, self.bound or 1))
            for name in SCHEDULES[:-1]
        }


add_arguments = splits.add_arguments


def run(args: argparse.Namespace) -> dict[str, Any]:
    rows = splits.table(splits.chosen(cells(), args.only), case, args.jobs)
    notes = splits.notes(STEPS, PUBLISHED)
    return harness.report("staleflow", rows, targets(rows), args, notes)


def cells() -> list[Cell]:
    places = [(model, devices, 2048) for model in MODELS for devices in DEVICES]
    # 2K is the setting's longest prompt; a short one shows how much depends on it.
    places.insert(1, (*places[0][:2], 256))
    bounds = [(name, bound) for name in SCHEDULES for bound in splits.bounds_of(name, BOUNDS)]
    return [Cell(name, *place, bound) for place in places for name, bound in bounds]


def case(cell: Cell) -> splits.Case:
    return splits.case(cell.devices, setting(cell), STEPS)


def setting(cell: Any) -> dict[str, str]:
    """Settings of recipe `cluster` for a cell that has at least the fields of `Cell`."""
    return {
        "schedule.name": cell.schedule,
        "schedule.max_staleness": str(cell.bound),
        "schedule.cost_model": MODELS[cell.model],
        "simulation.workload.mean_length": "5000",
        "simulation.workload.sigma": "0.99",
        "simulation.workload.prompt_tokens": str(cell.prompt),
        "drafting.window": "off",
    }


def targets(rows: Sequence[dict[str, Any]]) -> list[harness.Target]:
    """The published ratios: to synchronous, and to the strongest system without partial rollout.

    `partial` is none of the systems that were compared with, but our own first step towards
    `staleflow`; its target is 1.
    """
    ours = [r for r in rows if r["schedule"] == "staleflow" and r["prompt"] == 2048]
    strongest = [splits.over_better(r, ("one_step", "bounded")) for r in ours]
    best, mean = "staleflow/best of one_step and bounded", statistics.mean
    return splits.judged(
        ("staleflow/synchronous", max, [r["over synchronous"] for r in ours], 2.68),
        (f"{best}, greatest", max, strongest, 1.42),
        (f"{best}, mean", mean, strongest, 1.17),
        ("staleflow/partial, mean", mean, [r["over partial"] for r in ours], 1.0),
    )
