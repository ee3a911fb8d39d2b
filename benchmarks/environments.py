"""What slow environments cost: trained tokens per second of `smollm2_tools` with a calculator that
takes its time, over those with one that answers at once.

The calculator sleeps for a lognormal time (sigma 1). Each side is a run of its own, in turn; its
tokens are those that the policy sampled of what was trained on between the first and last version.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import tempfile
from collections.abc import Callable
from contextlib import closing
from typing import Any

from benchmarks import harness
from benchmarks.training.train import train
from rhymeflow.config.load import read_config
from rhymeflow.recipes.smollm2_tools import task
from rhymeflow.store.reader import TrajectoryReader

LEAST = 0.9
SIGMA = 1.0
MEAN = "RHYMEFLOW_BENCH_SECONDS"
"""The environment variable by which `calculate` knows how slow it is to be."""
_TOKENS = """SELECT SUM(s.length) FROM spans s JOIN trajectories t USING (group_id, member)
    WHERE t.trained > 0"""
_TIMES = "SELECT time FROM events WHERE kind = 'VersionPublished' ORDER BY seq"
_ANSWERS = "SELECT AVG(json_extract(body, '$.seconds')) FROM events WHERE kind = 'Observed'"


async def calculate(expression: str) -> str:
    """Calculate with numbers.

    Args:
        expression: Such as "12 + 30 * 2", with + - * / and parentheses.
    """
    await asyncio.sleep(latency(float(os.environ[MEAN]), expression))
    return task.calculate(expression)


def latency(mean: float, of: object) -> float:
    """Seconds that an answer takes; the same for the same question."""
    return random.Random(repr(of)).lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_number(parser, "--repeats", 1, "pairs of runs")
    harness.add_number(parser, "--steps", 4, "of each run")
    harness.add_number(parser, "--bound", 1, "schedule.max_staleness")
    parser.add_argument("--seconds", type=float, default=0.5, help="mean of an answer")


def run(args: argparse.Namespace) -> dict[str, Any]:
    seconds: dict[float, list[float]] = {args.seconds: [], 0.0: []}

    def measure(mean: float) -> Callable[[], float]:
        def once() -> float:
            rate, took = trained(mean, args)
            seconds[mean].append(took)
            return rate

        return once

    sides = {f"{mean:g} s": mean for mean in seconds}
    measured = {name: measure(mean) for name, mean in sides.items()}
    values = harness.interleave(measured, args.repeats, "tokens/s")
    rows = []
    for name, mean in sides.items():
        row = {"bound": args.bound, **harness.side_row(name, values[name], "tokens/s")}
        rows.append({**row, **harness.spread("s an answer", seconds[mean], 2)})
    slow, quick = (values[name] for name in sides)
    ratio = harness.median_ratio(slow, quick)
    targets = [harness.Target("environments/tokens-per-s", ratio, LEAST)]
    return harness.report("environments", rows, targets, args)


def trained(mean: float, args: argparse.Namespace) -> tuple[float, float]:
    """Trained tokens per second of a run, and the mean seconds of an answer."""
    with tempfile.TemporaryDirectory(prefix="rhymeflow-bench-") as folder:
        fields = {
            "learner.max_steps": str(args.steps),
            "schedule.max_staleness": str(args.bound),
            "run.output_dir": f"{folder}/run",
            "run.eval_steps": "0",
        }
        if mean:
            os.environ[MEAN] = str(mean)
            fields["environment.tools"] = "[benchmarks.environments.calculate]"
        run_dir = train(read_config("smollm2_tools", fields))
        with closing(TrajectoryReader(run_dir / "events.db")) as log:
            times = [seconds for (seconds,) in log.query(_TIMES)]
            ((tokens,),), ((answer,),) = log.query(_TOKENS), log.query(_ANSWERS)
    assert len(times) == args.steps
    return tokens / (times[-1] - times[0]), answer
