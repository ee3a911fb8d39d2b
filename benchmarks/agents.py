"""What it costs that a program calls the policy by HTTP: trained tokens per second of the recipe
`agent`, over those of `tools`, whose environment is a class that says the same.

Each side is a run of its own, in turn, of the same model, rows and steps; see `environments.speed`.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.environments import speed
from benchmarks.training.train import QUIET, repeated, train
from rhymeflow.config.load import read_config

LEAST = 0.9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_number(parser, "--repeats", 3, "pairs of runs")
    harness.add_number(parser, "--steps", 6, "of each run")


def run(args: argparse.Namespace) -> dict[str, Any]:
    sides = {recipe: partial(trained, recipe, args.steps) for recipe in ("agent", "tools")}
    rows, speeds = [], []
    for name, runs in repeated(sides, args.repeats, lambda run: run[0]).items():
        tokens, answers = zip(*runs, strict=True)
        speeds.append(tokens)
        row = harness.side_row(name, tokens, "tokens/s")
        rows.append(row | harness.spread("s an answer", answers, 4))
    ratio = harness.median_ratio(*speeds)
    targets = [harness.Target("agents/tokens-per-s", ratio, LEAST)]
    return harness.report("agents", rows, targets, args)


def trained(recipe: str, steps: int, _: int, run_dir: Path) -> tuple[float, float]:
    """Trained tokens per second, and the mean seconds until a turn was answered by another call or
    by the calculator."""
    fields = {**QUIET, "learner.max_steps": str(steps), "run.output_dir": str(run_dir)}
    train(read_config(recipe, fields))
    return speed(run_dir)
