"""How well the simulator predicts a real run: steps per second and idle shares.

Each round, for each schedule: a real run, to whose log `rhymeflow calibrate` fits a profile;
another run, with another seed; and a simulation with that profile on the lengths and rewards that
the other run recorded. Nothing is fitted to that one, nothing is drafted. What the simulator cannot
know is taken from the local runtime; a reward takes as long as in the run, by its event log.
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
from benchmarks.training.train import QUIET, cores, pinned, repeated, train, training_rows
from rhymeflow.calibration import calibrate
from rhymeflow.config import Config
from rhymeflow.config.load import build_config, read_config
from rhymeflow.core.events import TrajectoryFinished, TrajectoryRewarded
from rhymeflow.core.types import TrajectoryId
from rhymeflow.observe.metrics import time_weighted_mean
from rhymeflow.runtime.controller import ROUND_SECONDS
from rhymeflow.sim import simulate
from rhymeflow.sim.workload import workload
from rhymeflow.store.reader import RecordedEvent, TrajectoryReader
from rhymeflow.store.schema import EVENTS
from rhymeflow.workers.rollout import STATUS_SECONDS

SCHEDULES = {"staleflow": 1, "synchronous": 0}
"""And their bounds."""
INSTANCES = 1
TOLERANCE = 0.1
MESSAGE_SECONDS = 0.0005
"""A message between two processes by a pipe, packed and unpacked; a tenth of the shortest
iteration, and of no weight beside `ROUND_SECONDS`."""
SKIPPED = 1
"""Steps at the beginning that are not counted: caches and kernels are warmed up in them."""


class Figures(NamedTuple):
    """What is compared. Shares are of all instances' time, and of the learner's."""

    steps_per_s: float
    idle_rollout: float
    idle_learner: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_number(parser, "--steps", 20, "of each run, the first included")
    harness.add_number(parser, "--repeats", 3, "rounds; medians are reported")


def run(args: argparse.Namespace) -> dict[str, Any]:
    sides = {name: functools.partial(measure, name, args.steps) for name in SCHEDULES}
    seen = repeated(sides, args.repeats, lambda pair: pair[1].steps_per_s / pair[0].steps_per_s)
    rows = [row for name, found in seen.items() for row in compared(name, found)]
    targets = [target(row) for row in rows]
    return harness.report("simulator", rows, targets, args, notes=notes(args))


def notes(args: argparse.Namespace) -> str:
    learner, instances = cores(INSTANCES)
    return (
        f"demo, {INSTANCES} rollout instance, {args.steps} steps, medians of "
        f"{args.repeats} rounds of a run that is fitted to, a run and its simulation. Cores: "
        f"learner {learner}, instances {instances}, one thread each. Errors of idle shares are in "
        "shares of the time (0.1 is ten percentage points), and relative ones beside them."
    )


def measure(name: str, steps: int, _: int, run_dir: Path) -> tuple[Figures, Figures]:
    """Run, calibrate, run, simulate; return the real figures and the simulated ones."""
    fitted_to, profile = (run_dir.with_name(f"{run_dir.name}-fitted{end}") for end in ("", ".json"))
    calibrate(train(configure(name, steps, fitted_to, seed=1)), output=profile)
    config = configure(name, steps, run_dir)
    real = figures(training_rows(train(config)))
    result = simulate.run(as_it_ran(config, profile, run_dir), workload(config, run_dir))
    return real, Figures(result.steps_per_second, result.idle_rollout, result.idle_learner)


def configure(name: str, steps: int, run_dir: Path, seed: int = 0) -> Config:
    return read_config(
        "demo",
        {
            **QUIET,
            **pinned(INSTANCES),
            "drafting.window": "off",
            "schedule.name": name,
            "schedule.max_staleness": str(SCHEDULES[name]),
            "learner.max_steps": str(steps),
            "run.output_dir": str(run_dir),
            "run.seed": str(seed),
        },
    )


def as_it_ran(config: Config, profile: Path, run_dir: Path) -> Config:
    """The configuration of the simulation: the run's, with the local runtime's intervals.

    Routing in the run weighed with `schedule.cost_model`, so it does in the simulation.
    """
    with closing(TrajectoryReader(run_dir / EVENTS)) as reader:
        seconds = reward_seconds(reader.events())
    fields = {
        "simulation.profile": str(profile),
        "simulation.skip_steps": SKIPPED,
        "simulation.tick_seconds": ROUND_SECONDS,
        "simulation.snapshot_seconds": STATUS_SECONDS,
        "simulation.message_seconds": MESSAGE_SECONDS,
        "simulation.reward_seconds": seconds,
    }
    return build_config(fields, base=config, where="simulation")


def reward_seconds(log: Iterable[RecordedEvent]) -> float:
    """Median time from the event that finishes a response to that of its reward, less a round.

    Both wait for the end of a round of events, of which the simulation has its own.
    """
    finished: dict[TrajectoryId, float] = {}
    waits = []
    for _, when, event in log:
        match event:
            case TrajectoryFinished():
                finished[event.trajectory] = when
            case TrajectoryRewarded() if event.trajectory in finished:
                waits.append(when - finished[event.trajectory])
    return max(0.0, statistics.median(waits) - ROUND_SECONDS)


def figures(rows: Sequence[Mapping[str, float]]) -> Figures:
    counted = rows[SKIPPED:]
    rollout, learner = (
        time_weighted_mean(counted, f"idle/{part}") or 0.0 for part in ("rollout", "learner")
    )
    elapsed = counted[-1]["time"] - rows[SKIPPED - 1]["time"]
    return Figures(len(counted) / elapsed, rollout, learner)


def compared(name: str, pairs: Sequence[tuple[Figures, Figures]]) -> list[dict[str, Any]]:
    """A table row for each figure: medians, and the median of the rounds' errors."""
    rows = []
    for figure in Figures._fields:
        both = [(getattr(real, figure), getattr(simulated, figure)) for real, simulated in pairs]
        real, predicted = zip(*both, strict=True)
        errors = [b - a for a, b in both]
        relative = [b / a - 1 for a, b in both if a > 0]
        rows.append(
            {
                "schedule": name,
                "figure": figure,
                **harness.spread("real", real),
                "simulated": round(statistics.median(predicted), 4),
                "error": round(statistics.median(errors), 4),
                "relative": round(statistics.median(relative), 4) if relative else None,
            }
        )
    return rows


def target(row: Mapping[str, Any]) -> harness.Target:
    """Relative error of steps per second, errors of idle shares in shares of the time."""
    is_speed = row["figure"] == "steps_per_s"
    name = f"simulator/{row['schedule']}/{row['figure']} ({'relative' if is_speed else 'points'})"
    return harness.at_most(name, abs(row["relative" if is_speed else "error"]), TOLERANCE)
