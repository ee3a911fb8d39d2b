"""Real learning under the timing of clusters: seconds of the cluster to a held-out reward.

With `--record` runs accumulate. Other parts check the scale, compare ways of drafting, and kill
workers. How a run is made and measured: `benchmarks/clusters/runs.py`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import harness
from benchmarks.clusters import picture
from benchmarks.clusters.deaths import deaths
from benchmarks.clusters.runs import (
    ANSWERS,
    BASE,
    DRAFTED,
    GOAL,
    OURS,
    RUNS,
    SCALE,
    SETTINGS,
    SKIPPED,
    STEPS,
    Run,
    in_time,
    sides_of,
)
from benchmarks.clusters.short import drafting, half_scale
from benchmarks.schedules import Side


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_choice(parser, "--setting", SETTINGS)
    what = "schedules (default), a check of the scale, ways of drafting, or deaths"
    parser.add_argument("--part", choices=list(PARTS), default="schedules", help=what)
    what = "runs of each side (default: those of the setting; 0: report what is recorded)"
    parser.add_argument("--seeds", type=harness.whole(0), metavar="N", help=what)
    what = f"seconds of the cluster in one of this machine, for 16 instances (default {SCALE:g})"
    parser.add_argument("--scale", type=harness.whole(1), default=SCALE, metavar="S", help=what)


def run(args: argparse.Namespace) -> dict[str, Any]:
    rows, found = PARTS[args.part](args)
    name = "emulated" if args.part == "schedules" else f"emulated-{args.part}"
    command = made_by(rows) if args.part == "schedules" else None
    return harness.report(name, rows, found, args, notes(), command)


def made_by(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the commands that made the runs, which may be more than those of this one."""
    seeds = {row["setting"]: 0 for row in rows}
    for row in rows:
        seeds[row["setting"]] = max(seeds[row["setting"]], row["seeds"])
    made = "rhymeflow bench emulated --setting {} --seeds {} --record".format
    return " && ".join(made(*each) for each in seeds.items())


def schedules(args: argparse.Namespace) -> harness.Found:
    """Every schedule in each setting, with all runs that are recorded."""
    chosen = args.setting or ["a"]
    runs = harness.lines(RUNS, Run)
    for name in chosen:
        seeds = SETTINGS[name].seeds if args.seeds is None else args.seeds
        for seed in range(seeds):
            sides = sides_of(name)
            for side in sides if seed % 2 == 0 else reversed(sides):
                if not any((e.setting, e.side, e.seed) == (name, side, seed) for e in runs):
                    runs.append(in_time(name, side, seed, args.scale, runs))
                    if args.record:
                        harness.add_line(RUNS, runs[-1])
    if args.record and "a" in chosen:
        picture.draw([each for each in runs if each.setting == "a"])
    rows = [row for name in chosen for row in table(name, runs)]
    return rows, targets(rows)


PARTS = {"schedules": schedules, "scale": half_scale, "drafting": drafting, "deaths": deaths}


# -- report ----------------------------------------------------------------------------------------


def table(name: str, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each side: medians over seeds; ratios are paired by seed."""
    by_side: dict[Side, dict[int, Run]] = {}
    for each in runs:
        if each.setting == name:
            by_side.setdefault(each.side, {})[each.seed] = each
    rows = []
    for side in sides_of(name):
        if side not in by_side:
            continue
        found = list(by_side[side].values())
        long = [e.long_tokens_per_iteration for e in found if e.long_tokens_per_iteration]
        goals = [goal for goal in (each.reached for each in found) if goal is not None]
        median = statistics.median
        row: dict[str, Any] = {
            "setting": name,
            "schedule": side.schedule,
            "bound": side.bound,
            "drafts": side.has_drafts,
            "seeds": len(found),
            "reached": f"{len(goals)} of {len(found)}" if any(e.rewards for e in found) else "",
            "train devices": found[0].train_devices,
            "s/step": round(median(1 / each.steps_per_s for each in found), 1),
            "steps to goal": median(steps for steps, _ in goals) if goals else "",
            "s to goal": round(median(seconds for _, seconds in goals)) if goals else "",
        }
        for base, label in ((BASE, "synchronous"), (DRAFTED, "synchronous, drafts")):
            row |= ratios(by_side[side], by_side.get(base, {}), label)
        row |= {
            "tokens/iteration": round(median(e.tokens_per_iteration for e in found), 2),
            "long": round(median(long), 2) if long else "",
            "idle rollout": round(median(e.idle_rollout for e in found), 3),
            "idle learner": round(median(e.idle_learner for e in found), 3),
            "behind": round(max(max(e.learner_behind, e.rollout_behind) for e in found), 3),
            "simulated": round(median(e.simulated[0] / e.steps_per_s for e in found), 3),
            "simulated idle": round(max(abs(e.simulated[1] - e.idle_rollout) for e in found), 3),
        }
        rows.append(row)
    return rows


def ratios(runs: Mapping[int, Run], base: Mapping[int, Run], label: str) -> dict[str, float]:
    """Steps per second, time and steps to the goal over those of `base`, of the same seeds."""
    both = [(runs[seed], base[seed]) for seed in runs if seed in base]
    if not both:
        return {}
    median = statistics.median
    row = {
        f"steps/s over {label}": round(median(a.steps_per_s / b.steps_per_s for a, b in both), 3)
    }
    goals = [(a.reached, b.reached) for a, b in both]
    reach = [(a, b) for a, b in goals if a is not None and b is not None]
    if reach:
        row[f"time over {label}"] = round(median(b[1] / a[1] for a, b in reach), 3)
        row[f"steps over {label}"] = round(median(a[0] / b[0] for a, b in reach), 3)
    return row


def targets(rows: Sequence[Mapping[str, Any]]) -> list[harness.Target]:
    found = []

    def of(setting: str, side: Side, column: str) -> float | None:
        wanted = (setting, side.schedule, side.bound, side.has_drafts)
        names = "setting", "schedule", "bound", "drafts"
        return next(
            (r.get(column) for r in rows if tuple(r[name] for name in names) == wanted), None
        )

    for column, target in (
        ("time over synchronous", 2.7),
        ("steps/s over synchronous", 3.0),
        ("steps/s over synchronous, drafts", 1.5),
        ("time over synchronous, drafts", 1.35),
    ):
        if (value := of("a", OURS, column)) is not None:
            found.append(harness.Target(f"(a) rhymeflow, bound 1: {column}", value, target))
    if (value := of("a", OURS, "steps over synchronous")) is not None:
        found.append(harness.at_most("(a) rhymeflow, bound 1: steps over synchronous", value, 1.1))
    if (value := of("a", DRAFTED, "steps/s over synchronous")) is not None:
        found.append(harness.Target("(a) drafts alone: steps/s", value, 2.0))
    return found


def notes() -> str:
    return (
        f"Recipe `emulated`, {STEPS} steps; speed without the first {SKIPPED}. Times are of the "
        f"cluster, by its cost model. Goal: {GOAL} of {ANSWERS} answers to each of 128 held-out "
        "prompts, sampled at temperature 1. Ratios are paired by seed; `time over`: the other's "
        "seconds over this side's. `long`: tokens per iteration of responses of four mean lengths "
        "or more. `behind`: the greatest share by which this machine was late. `simulated`: steps "
        "per second of a simulation of the run over its own, and the greatest error of an idle "
        "share."
    )
