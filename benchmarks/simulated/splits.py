"""Simulated cases, each at the split of devices between rollout and training where it is fastest.

Holds true: equal cases are run once; whoever is compared is searched for in the same way, uphill
both ways from 6/16 of the devices for rollout, or from where they all say, in ever finer steps. A
way up that the learner alone forbids is not tried. Knows nothing of schedules: a case is settings
of recipe `cluster`.

    cases = {name: case(64, {"schedule.name": name}) for name in ("bounded", "staleflow")}
    found = best(list(cases.values()), jobs=2)
    ratio = found[cases["staleflow"]]["tokens/s"] / found[cases["bounded"]]["tokens/s"]
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rhymeflow import profiles
from rhymeflow.config import Config
from rhymeflow.config.load import read_config
from rhymeflow.sim.result import Result
from rhymeflow.sim.simulate import run as simulate
from rhymeflow.sim.workload import workload

Figures = dict[str, Any]

START = (6, 16)
"""The share of devices that the search begins with, unless a case says otherwise."""


class Case(NamedTuple):
    """One figure to find."""

    devices: int
    settings: tuple[tuple[str, str], ...]
    """Of recipe `cluster`, beyond the devices."""
    colocated: bool
    """All devices in turn: nothing to search for."""
    uncounted: int
    """Steps at the end that are not counted."""
    parts: tuple[int, ...]
    """The search goes by one of so many parts of the devices, then by one of so many; none: the
    start is not left."""
    start: tuple[int, int]
    """Share of the devices that the search begins with."""

    def __str__(self) -> str:
        told = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.settings)
        return f"{self.devices} devices, {told}"


def case(
    devices: int,
    overrides: Mapping[str, str],
    *,
    colocated: bool = False,
    uncounted: int = 0,
    parts: Iterable[int] = (16, 32),
    start: tuple[int, int] = START,
) -> Case:
    """A case; `overrides` are settings of recipe `cluster`."""
    return Case(
        devices, tuple(sorted(overrides.items())), colocated, uncounted, tuple(parts), start
    )


def best(cases: Sequence[Case], jobs: int) -> dict[Case, Figures]:
    """The figures of each case, `jobs` cases at a time; tells progress on stderr."""
    wanted = list(dict.fromkeys(cases))
    found = {}
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for number, (one, figures) in enumerate(
            zip(wanted, pool.imap(best_split, wanted), strict=True), 1
        ):
            found[one] = figures
            rate = f"{figures['tokens/s']:.0f} tokens/s on {figures['rollout devices']}"
            print(f"  {number}/{len(wanted)} {one}: {rate}", file=sys.stderr, flush=True)
    return found


def best_split(one: Case) -> Figures:
    """The figures at the best split that the search finds."""
    if one.colocated:
        return measure(one, None)
    return uphill(lambda rollout: measure(one, rollout), one)


def uphill(measured: Callable[[int], Figures], one: Case) -> Figures:
    """Search over rollout devices; `measured` gives the figures of a split."""
    each = instance_devices(one)
    known: dict[int, Figures] = {}

    def at(rollout: int) -> Figures:
        if rollout not in known:
            known[rollout] = measured(rollout)
        return known[rollout]

    def is_better(rollout: int, than: int) -> bool:
        if not each <= rollout < one.devices:
            return False
        if rollout > than and rollout not in known:
            limit = learner_limit(at(than), one.devices - than, one.devices - rollout)
            if limit <= at(than)["tokens/s"]:
                return False
        return bool(at(rollout)["tokens/s"] > at(than)["tokens/s"])

    def climbed(here: int, step: int) -> int:
        while is_better(here + step, here):
            here += step
        return here

    here = max(each, one.devices * one.start[0] // one.start[1] // each * each)
    steps = [max(each, one.devices // parts // each * each) for parts in one.parts]
    for step in dict.fromkeys(steps):
        here = max(climbed(here, -step), climbed(here, step), key=lambda n: at(n)["tokens/s"])
    return at(here)


def learner_limit(figures: Figures, devices: int, fewer: int) -> float:
    """Tokens/s that a learner never idle reaches on `fewer` devices, by how busy it was on some."""
    steps_per_second, push = figures["steps/s"], figures["push"]
    training = (1 - figures["idle learner"]) / steps_per_second - push
    tokens = figures["tokens/s"] / steps_per_second
    return float(tokens / (training * devices / fewer + push))


def instance_devices(one: Case) -> int:
    """Devices of one instance."""
    return profiles.load(dict(one.settings)["schedule.cost_model"]).devices_per_instance


def measure(one: Case, rollout_devices: int | None) -> Figures:
    """Simulate one split; None: all devices in turn."""
    config = configure(one, rollout_devices)
    result = simulate(config, workload(config, None), uncounted=one.uncounted)
    return figures_of(result, one, rollout_devices, profiles.load(config.schedule.cost_model).push)


def configure(one: Case, rollout_devices: int | None) -> Config:
    """Recipe `cluster` with the case's settings, on this split."""
    return read_config(
        "cluster",
        {
            "simulation.num_devices": str(one.devices),
            "simulation.rollout_devices": str(rollout_devices) if rollout_devices else "null",
            "simulation.colocated": "false" if rollout_devices else "true",
            **dict(one.settings),
        },
    )


def figures_of(result: Result, one: Case, rollout_devices: int | None, push: float) -> Figures:
    """What is told of a result.

    `rollout share` is of the time, and 1 unless rollout and training take turns. `idle rollout` is
    of all the time, `idle in rollout` of rollout's share; of `idle devices` neither makes use.
    """
    responses = sum(result.staleness.values())
    staleness = sum(age * count for age, count in result.staleness.items())
    share = result.idle_learner if one.colocated else 1.0
    rollout = rollout_devices or one.devices
    learner_idle = 0.0 if one.colocated else (one.devices - rollout) * result.idle_learner
    in_rollout = 1 - (1 - result.idle_rollout) / share
    return {
        "rollout devices": rollout,
        "tokens/s": result.throughput,
        "steps/s": result.steps_per_second,
        "idle rollout": result.idle_rollout,
        "idle in rollout": in_rollout,
        "idle learner": result.idle_learner,
        "idle devices": (rollout * share * in_rollout + learner_idle) / one.devices,
        "rollout share": share,
        "mean staleness": staleness / responses,
        "greatest staleness": max(result.staleness),
        "wasted": result.tokens_wasted / result.tokens_generated,
        "interrupted": result.interrupts / responses,
        "push": push,
    }


def shown(figures: Figures, *names: str) -> Figures:
    """These of the figures, rounded for a table."""
    return {name: _rounded(name, figures[name]) for name in names}


def _rounded(name: str, value: Any) -> Any:
    if name == "tokens/s":
        return round(value)
    return round(value, 2 if name.endswith("staleness") else 3)
