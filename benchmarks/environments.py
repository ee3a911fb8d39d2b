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
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.training.train import repeated, train
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
    sides = {f"{mean:g} s": partial(trained, mean, args) for mean in (args.seconds, 0.0)}
    rows, speeds = [], []
    for name, runs in repeated(sides, args.repeats, lambda run: run[0]).items():
        tokens, answers = zip(*runs, strict=True)
        speeds.append(tokens)
        row = {"bound": args.bound, **harness.side_row(name, tokens, "tokens/s")}
        rows.append(row | harness.spread("s an answer", answers, 2))
    ratio = harness.median_ratio(*speeds)
    targets = [harness.Target("environments/tokens-per-s", ratio, LEAST)]
    return harness.report("environments", rows, targets, args)


def trained(mean: float, args: argparse.Namespace, _: int, run_dir: Path) -> tuple[float, float]:
    """Trained tokens per second, and the mean seconds of an answer."""
    fields = {
        "learner.max_steps": str(args.steps),
        "schedule.max_staleness": str(args.bound),
        "run.output_dir": str(run_dir),
        "run.eval_steps": "0",
    }
    if mean:
        os.environ[MEAN] = str(mean)
        fields["environment.tools"] = "[benchmarks.environments.calculate]"
    train(read_config("smollm2_tools", fields))
    return speed(run_dir)


def speed(run_dir: Path) -> tuple[float, float]:
    """Trained tokens per second of a run with turns, and the mean seconds of an answer."""
    with closing(TrajectoryReader(run_dir / "events.db")) as log:
        times = [seconds for (seconds,) in log.query(_TIMES)]
        ((tokens,),), ((answer,),) = log.query(_TOKENS), log.query(_ANSWERS)
    return tokens / (times[-1] - times[0]), answer
