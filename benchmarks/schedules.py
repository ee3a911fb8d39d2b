"""The schedules: real runs until a held-out reward, or simulated clusters with `--simulated`.

Real runs differ in schedule, drafts and seed only, and are made in turn, workers pinned; each is
evaluated greedily every few versions on the instances that also generate, which dilutes what a
schedule wins, and continues until an evaluation reaches the goal and `LEAST_STEPS` are done.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.simulated import schedules as simulated
from benchmarks.simulated import splits
from benchmarks.training.train import cores, pinned, repeated, train, training_rows
from rhymeflow.config.load import read_config
from rhymeflow.core.events import Evaluated, InstanceJoined, LearnerReady, VersionPublished
from rhymeflow.observe import metrics
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import EVENTS

RECORD = "schedules-learning"
NAMES = simulated.NAMES
BOUNDS = (1, 3)
"""Of the schedules that don't fix it."""
REFERENCES = ("synchronous", "staleflow")
"""Also run without drafts."""
LEAST_STEPS = 37
"""Of every run, so that all are equally long where speed is concerned: two epochs of the demo, and
what may be trained on late."""
INSTANCES, EVAL_STEPS, MAX_STEPS = 2, 2, 96
"""Of rollout; versions between evaluations; steps of a run that does not reach the goal."""
GOAL = 0.85
"""Held-out reward."""
TARGET = 0.5
"""Seconds of `rhymeflow` over those of `synchronous`."""
OVER_ALLOWED = 1.1
"""That ratio at bound 1, over what the phases of `synchronous` allow (`phases_allow`)."""


class Side(NamedTuple):
    schedule: str
    bound: int
    has_drafts: bool = True
    """As the recipe drafts; False: not at all."""

    def __str__(self) -> str:
        drafts = "" if self.has_drafts else ", no drafts"
        return f"{self.schedule}, bound {self.bound}{drafts}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--simulated", action="store_true", help="simulate, instead of real runs")
    real = parser.add_argument_group("real runs")
    harness.add_choice(real, "--schedule", NAMES)
    what = "of schedules that don't fix theirs; may be repeated (default: 1 and 3)"
    real.add_argument("--bound", type=harness.whole(0), action="append", help=what, metavar="N")
    harness.add_number(real, "--seeds", 3, "runs of each side")
    what = "leave out the references that run without drafts"
    real.add_argument("--drafting-only", action="store_true", help=what)
    splits.add_arguments(parser.add_argument_group("with --simulated"))


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.simulated:
        return simulated.run(args)
    chosen = sides(args.schedule or NAMES, args.bound or BOUNDS)
    if args.drafting_only:
        chosen = [side for side in chosen if side.has_drafts]
    measures = {side: functools.partial(measure, side) for side in chosen}
    seen = repeated(measures, args.seeds, lambda run: run.seconds)
    rows = table(seen)
    name = RECORD if args.schedule is None else f"{RECORD}-chosen"
    return harness.report(name, rows, targets(rows, args), args, notes=notes(args))


def sides(names: Iterable[str], bounds: Sequence[int]) -> list[Side]:
    """Every schedule at its bounds; then the references without drafts, at the lowest."""
    found = [Side(name, bound) for name in names for bound in splits.bounds_of(name, bounds)]
    lowest = {side.schedule: side for side in reversed(sorted(found))}
    bare = [lowest[name]._replace(has_drafts=False) for name in REFERENCES if name in lowest]
    return found + bare


def measure(side: Side, seed: int, run_dir: Path) -> Run:
    fields = {
        **pinned(INSTANCES),
        "schedule.name": side.schedule,
        "schedule.max_staleness": str(side.bound),
        "learner.max_steps": str(MAX_STEPS),
        "run.eval_steps": str(EVAL_STEPS),
        "run.report_to": "[]",
        "run.seed": str(seed),
        "run.output_dir": str(run_dir.resolve()),
    }
    if not side.has_drafts:
        fields["drafting.window"] = "off"
    found = read(train(read_config("demo", fields), is_enough=is_enough))
    assert found.staleness <= side.bound, f"{side}: staleness {found.staleness}"
    return found


def is_enough(run_dir: Path) -> bool:
    """Whether `LEAST_STEPS` are done and an evaluation has reached the goal."""
    rows = metrics.read(run_dir)
    steps = max((step for step, row in rows.items() if "reward" in row), default=0)
    rewards = [row["eval/reward"] for row in rows.values() if "eval/reward" in row]
    return steps >= LEAST_STEPS and max(rewards, default=0.0) >= GOAL


# -- the log of a run -----------------------------------------------------------------------------


class Evaluation(NamedTuple):
    seconds: float
    """When its result is known."""
    version: int
    reward: float


class Run(NamedTuple):
    """What the log of one run says."""

    is_goal: bool
    """Whether held-out reward reached the goal; a run that did not counts with all its time."""
    seconds: float
    """From when it was ready, a version published and an instance joined, to that evaluation."""
    steps: int
    steps_per_s: float
    """From the first version to the last."""
    staleness: int
    """Greatest of all trained trajectories."""
    training: float
    """Share of its time in which the learner trained."""


def read(run_dir: Path, goal: float = GOAL) -> Run:
    first: dict[type, float] = {}
    evaluations, published = [], []
    with closing(TrajectoryReader(run_dir / EVENTS)) as reader:
        for _, time, event in reader.events():
            match event:
                case LearnerReady() | InstanceJoined():
                    first.setdefault(type(event), time)
                case Evaluated() if event.reward is not None:
                    evaluations.append(Evaluation(time, event.version, event.reward))
                case VersionPublished():
                    published.append(time)
        ((staleness,),) = reader.query("SELECT MAX(staleness) FROM trained")
    is_goal, end, steps = reached(evaluations, published, goal)
    speed = (len(published) - 1) / (published[-1] - published[0])
    training = 1 - (metrics.time_weighted_mean(training_rows(run_dir), "idle/learner") or 0.0)
    return Run(is_goal, end - max(first.values()), steps, speed, staleness, training)


def reached(
    evaluations: Sequence[Evaluation], published: Sequence[float], goal: float
) -> tuple[bool, float, int]:
    """Whether, when and after how many steps reward was at the goal; nothing is interpolated."""
    for evaluation in evaluations:
        if evaluation.reward >= goal:
            return True, evaluation.seconds, evaluation.version
    last = max(published[-1], *(each.seconds for each in evaluations))
    return False, last, len(published)


# -- report ----------------------------------------------------------------------------------------


def table(seen: Mapping[Side, list[Run]]) -> list[dict[str, Any]]:
    """A row for each side: medians over seeds; ratios are paired by seed."""
    base = next((s for s in seen if s.schedule == "synchronous" and s.has_drafts), None)
    rows = []
    for side, runs in seen.items():
        row = {
            "schedule": side.schedule,
            "bound": side.bound,
            "drafts": side.has_drafts,
            "reached": f"{sum(run.is_goal for run in runs)} of {len(runs)}",
            **harness.spread("seconds", [run.seconds for run in runs], 2),
            "steps to goal": statistics.median(run.steps for run in runs),
            "steps/s": round(statistics.median(run.steps_per_s for run in runs), 3),
            "greatest staleness": max(run.staleness for run in runs),
        }
        if base is not None:
            pairs = zip(runs, seen[base], strict=True)
            ratios = harness.spread("ratio", [a.seconds / b.seconds for a, b in pairs], 3)
            row["ratio"] = ratios.pop("ratio")
            row["allowed"] = round(statistics.median(map(phases_allow, seen[base])), 3)
            row |= {f"ratio, {name}": value for name, value in ratios.items()}
        rows.append(row)
    return rows


def phases_allow(run: Run) -> float:
    """What part of a synchronous run's time would be left if training and the rest of it, rollout,
    went on at once and neither ever waited: the longer of the two."""
    return max(run.training, 1 - run.training)


def targets(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> list[harness.Target]:
    found = []
    for row in rows:
        if row["schedule"] == "rhymeflow" and "ratio" in row:
            name = f"learning/rhymeflow, bound {row['bound']}/synchronous"
            if row["reached"] != f"{args.seeds} of {args.seeds}":
                name += f", reached {row['reached']}"
            found.append(harness.at_most(name, row["ratio"], TARGET))
            if row["bound"] == 1:
                over = row["ratio"] / row["allowed"]
                found.append(harness.at_most(f"{name}/allowed", over, OVER_ALLOWED))
    return found


def notes(args: argparse.Namespace) -> str:
    learner, instances = cores(INSTANCES)
    return (
        f"demo, {INSTANCES} rollout instances, {args.seeds} seeds, runs interleaved, "
        f"medians. Cores: learner {learner}, instances {instances}, one thread each. `seconds`: "
        "from when the run is ready (a version published, an instance joined) to the first "
        f"greedy evaluation, of one every {EVAL_STEPS} versions, whose held-out reward is "
        f"{GOAL:g} or more. A run that ended before counts with all its time. Ratios are to "
        "`synchronous` with the same seed; `allowed` is the longer of training and the rest "
        "(rollout, evaluation included) over all the time, in the runs of `synchronous`."
    )
