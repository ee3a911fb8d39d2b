"""Simulated cases, each at the split of devices between rollout and training where it is fastest.

Equal cases are simulated once, and every case is searched in the same way. A case is settings of
recipe `cluster`; the coordinator is the one that drives real runs.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from benchmarks import harness
from rhymeflow import profiles
from rhymeflow.config import Config
from rhymeflow.config.load import read_config
from rhymeflow.errors import UserError
from rhymeflow.sim.result import SimulationResult
from rhymeflow.sim.simulate import run as simulate
from rhymeflow.sim.workload import workload
from rhymeflow.utils.bounds import FIXED_BOUNDS

Key = TypeVar("Key", bound=Hashable)
Cell = TypeVar("Cell", bound=Any)  # a named tuple
Figures = dict[str, Any]

SKIPPED = 4
"""Steps at the beginning that are not counted: the first batches fill buffers and history."""
SCANNED = 8
"""Parts of the devices, by which all splits are measured before the search for the best one."""
SEEDS = 3
NOTES = (
    "Simulated, {steps} steps, of which the first {skipped} are not counted. Each figure is the "
    "mean of {seeds} seeds (`greatest staleness` the greatest), at the split (rollout devices of "
    "all) where the schedule is fastest with the first seed; `spread`: the greatest tokens/s of a "
    "seed over the least. {more}`rollout share` is of the time, and 1 unless rollout and training "
    "alternate; `idle rollout` is of all the time, `idle in rollout` of rollout's share; `idle "
    "devices` do neither. `interrupted`: interruptions per response; `wasted tokens`: share never "
    "trained on. Assumptions: benchmarks/README.md."
)


class Case(NamedTuple):
    devices: int
    settings: tuple[tuple[str, str], ...]
    """Of recipe `cluster`, besides the devices."""
    colocated: bool = False
    """All devices alternate: there is nothing to search."""
    uncounted: int = 0
    """Steps at the end that are not counted."""
    parts: tuple[int, ...] = (16,)
    """The search moves by one of so many parts of the devices, then by one of so many."""

    def __str__(self) -> str:
        told = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.settings)
        return f"{self.devices} devices, {told}"

    @property
    def per_instance(self) -> int:
        return profiles.load(dict(self.settings)["schedule.cost_model"]).devices_per_instance


def case(
    devices: int, settings: Mapping[str, str], steps: int, *, uncounted: int = 0, **search: Any
) -> Case:
    """A case of so many steps; where nothing runs ahead, all at the end are counted."""
    bound = settings.get("schedule.max_staleness", "1")
    colocated = FIXED_BOUNDS.get(settings["schedule.name"], int(bound)) == 0
    uncounted = 0 if colocated else uncounted
    settings = {
        **settings,
        "learner.max_steps": str(steps + uncounted),
        "simulation.skip_steps": str(SKIPPED),
    }
    return Case(devices, tuple(sorted(settings.items())), colocated, uncounted, **search)


def planned_every(seconds: int) -> dict[str, str]:
    """Settings of steps that last minutes: work grows with plans and snapshots."""
    return {
        "simulation.tick_seconds": str(seconds),
        "simulation.snapshot_seconds": str(10 * seconds),
    }


def add_arguments(parser: argparse._ActionsContainer) -> None:
    what = "rows of the table to find, as model=14b; may be repeated (default: all)"
    parser.add_argument("--only", action="append", default=[], metavar="COLUMN=VALUE", help=what)
    harness.add_number(parser, "--jobs", 2, "cases at a time")


def chosen(cells: Iterable[Cell], only: Sequence[str]) -> list[Cell]:
    """Those whose fields have one of the values that were asked for; `UserError` if none has."""
    found = list(cells)
    for column in dict.fromkeys(each.partition("=")[0] for each in only):
        wanted = [value for name, _, value in (e.partition("=") for e in only) if name == column]
        found = [cell for cell in found if str(getattr(cell, column, None)) in wanted]
    if not found:
        raise UserError(f"--only {' --only '.join(only)}: the table has no such row")
    return found


def bounds_of(schedule: str, bounds: Iterable[int]) -> Iterable[int]:
    return (FIXED_BOUNDS[schedule],) if schedule in FIXED_BOUNDS else bounds


def best(cases: Mapping[Key, Case], jobs: int) -> dict[Key, Figures]:
    """The figures of each case, `jobs` cases at a time; reports progress on stderr."""
    wanted = list(dict.fromkeys(cases.values()))
    found: dict[Case, Figures] = {}
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for one, figures in zip(wanted, pool.imap(best_split, wanted), strict=True):
            found[one] = figures
            rate = f"{figures['tokens/s']:.0f} tokens/s on {figures['rollout devices']}"
            print(f"  {len(found)}/{len(wanted)} {one}: {rate}", file=sys.stderr, flush=True)
    return {key: found[one] for key, one in cases.items()}


def best_split(one: Case) -> Figures:
    """The figures, in the mean of seeds, at the best split that the search finds with the first."""
    measured = functools.partial(measure, one)
    first = measured(None) if one.colocated else searched(measured, one)
    split = None if one.colocated else int(first["rollout devices"])
    return mean_of([first, *(measured(split, seed) for seed in range(1, SEEDS))])


def mean_of(found: Sequence[Figures]) -> Figures:
    """The means of one split's figures, of counts the greatest, and `spread`."""
    rates = [each["tokens/s"] for each in found]
    figures: Figures = {}
    for name, value in found[0].items():
        every = [each[name] for each in found]
        figures[name] = max(every) if isinstance(value, int) else statistics.fmean(every)
        if name == "tokens/s":
            figures["spread"] = max(rates) / min(rates)
    return figures


def searched(measured: Callable[[int], Figures], one: Case) -> Figures:
    """Search over rollout devices; `measured` gives the figures of a split.

    Every split by `SCANNED` parts is measured, and the best one is the start of a climb by smaller
    parts: a schedule can have two peaks, and a climb alone can end at the lower one.
    """
    each, at = one.per_instance, functools.cache(measured)

    def speed(rollout: int) -> float:
        return float(at(rollout)["tokens/s"])

    def climbed(here: int, step: int) -> int:
        while each <= here + step < one.devices and speed(here + step) > speed(here):
            here += step
        return here

    steps = [max(each, one.devices // parts // each * each) for parts in (SCANNED, *one.parts)]
    here = max(range(steps[0], one.devices, steps[0]), key=speed)
    for step in dict.fromkeys(steps[1:]):
        here = max(climbed(here, -step), climbed(here, step), key=speed)
    return at(here)


def measure(one: Case, rollout_devices: int | None, seed: int = 0) -> Figures:
    """Simulate one split; None: all devices alternate."""
    config = configure(one, rollout_devices, seed)
    result = simulate(config, workload(config, None), uncounted=one.uncounted)
    return figures_of(result, one, rollout_devices or one.devices)


def configure(one: Case, rollout_devices: int | None, seed: int = 0) -> Config:
    """Recipe `cluster` with the case's settings, on this split."""
    return read_config(
        "cluster",
        {
            "rollout.num_instances": str((rollout_devices or one.devices) // one.per_instance),
            "learner.num_ranks": str(one.devices - (rollout_devices or 0)),
            "simulation.colocated": "false" if rollout_devices else "true",
            "run.seed": str(seed),
            **dict(one.settings),
        },
    )


def figures_of(result: SimulationResult, one: Case, rollout: int) -> Figures:
    responses = sum(result.staleness.values())
    staleness = sum(age * count for age, count in result.staleness.items())
    share = result.idle_learner if one.colocated else 1.0
    learner_idle = 0.0 if one.colocated else (one.devices - rollout) * result.idle_learner
    in_rollout = 1 - (1 - result.idle_rollout) / share
    return {
        "rollout devices": rollout,
        "tokens/s": result.throughput,
        "rollout share": share,
        "idle rollout": result.idle_rollout,
        "idle in rollout": in_rollout,
        "idle learner": result.idle_learner,
        "idle devices": (rollout * share * in_rollout + learner_idle) / one.devices,
        "mean staleness": staleness / responses,
        "greatest staleness": max(result.staleness),
        "interrupted": result.interrupts / responses,
        "wasted tokens": result.tokens_wasted / result.tokens_generated,
    }


def table(cells: Iterable[Cell], case: Callable[[Cell], Case], jobs: int) -> list[dict[str, Any]]:
    """A row for each cell: its fields, its figures, and `over NAME` for each of its baselines."""
    wanted = {cell: cell.baselines() for cell in cells}
    bases = [base for each in wanted.values() for base in each.values()]
    found = best({cell: case(cell) for cell in (*wanted, *bases)}, jobs)
    rows = []
    for cell, bases in wanted.items():
        rate = found[cell]["tokens/s"]
        columns = {n: round(value, 3) for n, value in found[cell].items()}
        columns["tokens/s"] = round(rate)
        ratios = {f"over {n}": round(rate / found[b]["tokens/s"], 4) for n, b in bases.items()}
        rows.append({**cell._asdict(), **columns, **ratios})
    return rows


def over_better(row: Mapping[str, Any], rivals: Sequence[str]) -> float:
    return float(min(row[f"over {name}"] for name in rivals))


def judged(
    *wanted: tuple[str, Callable[[Sequence[float]], float], Sequence[float], float],
) -> list[harness.Target]:
    """Targets of (name, max or min or mean, of these figures, target); none where no figure is."""
    return [harness.Target(name, of(values), to) for name, of, values, to in wanted if values]


def notes(steps: int, more: str = "") -> str:
    return NOTES.format(steps=steps, skipped=SKIPPED, seeds=SEEDS, more=more)
