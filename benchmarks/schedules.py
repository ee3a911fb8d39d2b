"""The schedules: real runs until a held-out reward, or simulated clusters.

    rhymeflow bench schedules                seconds to a held-out reward; length bias; curves
    rhymeflow bench schedules --simulated    the same coordinator on simulated clusters

Real runs differ in schedule, drafts and seed only, and are made in turn, each worker pinned. All
schedules draft as the recipe says; `synchronous` and `staleflow` run once more without drafts, at
the lowest bound. Each run is evaluated every few versions, greedily, on the instances that also
generate: evaluation costs every side the same work, and dilutes what a schedule wins. A run
continues until an evaluation reaches the goal and the epochs are over on which length bias is
judged (benchmarks/training/order.py).
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec

from benchmarks import harness
from benchmarks.simulated import schedules as simulated
from benchmarks.simulated import splits
from benchmarks.training import log, order
from benchmarks.training.chart import Curve, reward_by_seconds
from benchmarks.training.log import Run
from benchmarks.training.train import cores, pinned, train
from rhymeflow.config import FIXED_BOUNDS, Config, ScheduleConfig
from rhymeflow.config.load import dump_config, read_config
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics

RECORD = "schedules-learning"
NAMES: tuple[str, ...] = get_args(ScheduleConfig.model_fields["name"].annotation)
BOUNDS = (1, 3)
"""Of the schedules that don't fix it."""
REFERENCES = ("synchronous", "staleflow")
"""Also run without drafts."""
TARGET = 0.5
"""Seconds of `rhymeflow` over those of `synchronous`."""


class Side(NamedTuple):
    """What is compared."""

    schedule: str
    bound: int
    has_drafts: bool = True
    """As the recipe drafts; False: not at all."""

    def __str__(self) -> str:
        drafts = "" if self.has_drafts else ", no drafts"
        return f"{self.schedule}, bound {self.bound}{drafts}"


Runs = dict[Side, list[Run]]
"""In the order of seeds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    harness.add_choice(parser, "--schedule", NAMES)
    splits.add_numbers(parser, "--bound", "of schedules that don't fix theirs", BOUNDS, least=0)
    parser.add_argument("--simulated", action="store_true", help="simulate, instead of real runs")
    real = parser.add_argument_group("real runs")
    real.add_argument("--recipe", default="demo")
    harness.add_number(real, "--instances", 2, "of rollout")
    harness.add_number(real, "--seeds", 3, "runs of each side")
    harness.add_number(real, "--eval-steps", 2, "versions between evaluations")
    harness.add_number(real, "--epochs", 2, "on which length bias is judged")
    harness.add_number(real, "--max-steps", 96, "if the goal is not reached")
    real.add_argument(
        "--goal", type=harness.share, default=0.85, help="held-out reward (default 0.85)"
    )
    real.add_argument(
        "--runs",
        type=Path,
        metavar="DIR",
        help="keep runs here; those that are complete are reused",
    )
    simulated.add_arguments(parser.add_argument_group("with --simulated"))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Make the runs that are missing, and report; or simulate."""
    if args.simulated:
        return simulated.run(args)
    chosen = sides(args.schedule or NAMES, args.bound or BOUNDS)
    seen: Runs = {side: [] for side in chosen}
    with tempfile.TemporaryDirectory(prefix="rhymeflow-schedules-") as temporary:
        folder = args.runs or Path(temporary)
        measures = {
            str(side): functools.partial(measure, side, args, folder, seen[side]) for side in chosen
        }
        harness.interleave(measures, args.seeds)
    rows = table(seen, args)
    result = harness.report(RECORD, rows, targets(rows, args), args, notes=notes(args))
    if args.record:
        record_curves(seen, args.goal)
    return result


def sides(names: Iterable[str], bounds: Sequence[int]) -> list[Side]:
    """Every schedule at its bounds; then the references without drafts, at the lowest."""
    found = [
        Side(name, bound)
        for name in names
        for bound in ([FIXED_BOUNDS[name]] if name in FIXED_BOUNDS else bounds)
    ]
    lowest = {side.schedule: side for side in reversed(sorted(found))}
    return found + [
        lowest[name]._replace(has_drafts=False) for name in REFERENCES if name in lowest
    ]


def measure(side: Side, args: argparse.Namespace, folder: Path, seen: list[Run]) -> float:
    """Make the next seed's run, or reuse it; return its seconds to the goal."""
    drafts = "" if side.has_drafts else "-no-drafts"
    run_dir = folder / f"{side.schedule}-{side.bound}{drafts}-{len(seen)}"
    config = configure(side, args, seed=len(seen), run_dir=run_dir)
    kept = run_dir / "figures.json"
    if kept.exists():
        told, found = msgspec.json.decode(kept.read_bytes(), type=tuple[str, Run])
        if told != dump_config(config):
            raise UserError(f"{run_dir}: a run with other settings; choose another --runs")
    else:
        if run_dir.exists():  # left by a benchmark that was interrupted
            shutil.rmtree(run_dir)
        least = least_steps(config, args)
        train(config, is_enough=functools.partial(is_enough, least=least, goal=args.goal))
        found = log.read(run_dir)
        kept.write_bytes(msgspec.json.encode((dump_config(config), found)))
    assert found.staleness <= side.bound, f"{side}: staleness {found.staleness}"
    seen.append(found)
    return log.reached(found, args.goal).seconds


def configure(side: Side, args: argparse.Namespace, seed: int, run_dir: Path) -> Config:
    """The recipe under one schedule."""
    least = least_steps(read_config(args.recipe, {}), args)
    return read_config(
        args.recipe,
        {
            **pinned(args.instances),
            **({} if side.has_drafts else {"drafting.window": "off"}),
            "schedule.name": side.schedule,
            "schedule.max_staleness": str(side.bound),
            "learner.max_steps": str(max(args.max_steps, least)),
            "run.eval_steps": str(args.eval_steps),
            "run.report_to": "[]",
            "run.seed": str(seed),
            "run.output_dir": str(run_dir.resolve()),
        },
    )


def least_steps(config: Config, args: argparse.Namespace) -> int:
    """Steps of the epochs that are judged, and of what may be trained on late."""
    if config.data.size is None:
        raise UserError(f"--recipe {args.recipe}: data.size is not set, so it has no epochs")
    epoch = -(-config.data.size // config.learner.groups_per_batch)
    return args.epochs * epoch + max(args.bound or BOUNDS) + 2


def is_enough(run_dir: Path, *, least: int, goal: float) -> bool:
    """Whether so many steps are done and an evaluation has reached the goal."""
    rows = metrics.read(run_dir)
    steps = max((step for step, row in rows.items() if "reward" in row), default=0)
    rewards = [row["eval/reward"] for row in rows.values() if "eval/reward" in row]
    return steps >= least and max(rewards, default=0.0) >= goal


# -- report ----------------------------------------------------------------------------------------


def table(seen: Runs, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each side: medians over seeds; ratios are paired by seed."""
    base = next((found for side, found in seen.items() if _is_baseline(*side)), None)
    rows = []
    for side, found in seen.items():
        goals = [log.reached(run, args.goal) for run in found]
        seconds = [goal.seconds for goal in goals]
        row = {
            "schedule": side.schedule,
            "bound": side.bound,
            "drafts": side.has_drafts,
            "reached": f"{sum(goal.is_goal for goal in goals)} of {len(goals)}",
            "seconds": round(statistics.median(seconds), 2),
            "least": round(min(seconds), 2),
            "greatest": round(max(seconds), 2),
            "published": round(statistics.median(goal.published for goal in goals), 2),
            "steps to goal": statistics.median(goal.steps for goal in goals),
            "steps/s": round(statistics.median(map(log.steps_per_second, found)), 3),
            "greatest staleness": max(run.staleness for run in found),
        }
        if base is not None:
            theirs = [log.reached(run, args.goal).seconds for run in base]
            ratios = [a / b for a, b in zip(seconds, theirs, strict=True)]
            row |= {
                "ratio": round(statistics.median(ratios), 3),
                "ratio, least": round(min(ratios), 3),
                "ratio, greatest": round(max(ratios), 3),
            }
        shift = order.deviation(found, args.epochs)
        row |= {
            "groups trained on": round(order.trained_share(found, args.epochs), 4),
            "trained less requested, tokens": round(shift.value, 3),
            "standard error": round(shift.error, 3),
            "in standard errors": round(shift.errors, 2),
        }
        rows.append(row)
    return rows


def _is_baseline(schedule: str, bound: int, has_drafts: bool) -> bool:
    return schedule == "synchronous" and has_drafts


def targets(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> list[harness.Target]:
    """`rhymeflow`'s time against `synchronous`', and every schedule's length bias."""
    found = []
    for row in rows:
        if row["schedule"] == "rhymeflow" and "ratio" in row:
            name = f"learning/rhymeflow, bound {row['bound']}/synchronous"
            if row["reached"] != f"{args.seeds} of {args.seeds}":
                name += f", reached {row['reached']}"
            found.append(harness.Target(name, row["ratio"], TARGET, at_most=True))
    least = min(row["groups trained on"] for row in rows)
    found.append(harness.Target("learning/groups trained on, least", least, 1.0))
    others = [row for row in rows if row["schedule"] != "synchronous"]
    if others:
        worst = max(others, key=lambda row: row["in standard errors"])
        name = f"learning/order by length, standard errors, most ({worst['schedule']})"
        most = round(order.limit(len(others)), 2)
        found.append(harness.Target(name, worst["in standard errors"], most, at_most=True))
    return found


def notes(args: argparse.Namespace) -> str:
    """How it was measured."""
    learner, instances = cores(args.instances)
    return (
        f"{args.recipe}, {args.instances} rollout instances, {args.seeds} seeds, runs interleaved, "
        f"medians. Cores: learner {learner}, instances {instances}, one thread each. `seconds`: "
        "from when the run is ready (a version published, an instance joined) to the first "
        f"greedy evaluation, of one every {args.eval_steps} versions, whose held-out reward is "
        f"{args.goal:g} or more; `published`: to the publication of that version. A run that ended "
        "before counts with all its time. Ratios are to `synchronous` with the same seed. Of the "
        f"first {args.epochs} epochs: `groups trained on` is a share; `trained less requested` is "
        "how much longer the responses trained on by a step are than those requested by then "
        "(benchmarks/training/order.py). All curves: schedules-learning-runs.jsonl."
    )


def record_curves(seen: Runs, goal: float) -> None:
    """Write every run's held-out reward and publication times beside the report; draw them."""
    curves, lines = [], []
    for side, found in seen.items():
        for seed, run in enumerate(found):
            points = [
                (round(e.seconds - run.ready, 3), e.version, round(e.reward, 5))
                for e in run.evaluations
            ]
            curve = Curve(str(side), side.schedule, side.bound, side.has_drafts, seed, points)
            published = [round(seconds - run.ready, 3) for seconds in run.published]
            curves.append(curve)
            lines.append(json.dumps({**msgspec.to_builtins(curve), "published": published}) + "\n")
    path = harness.RESULTS / f"{RECORD}-runs.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    seconds = {
        str(side): statistics.median(log.reached(run, goal).seconds for run in found)
        for side, found in seen.items()
    }
    reward_by_seconds(curves, seconds, goal, harness.RESULTS / f"{RECORD}.png")
