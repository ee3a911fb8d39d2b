"""What it costs that a program calls the policy by HTTP: trained tokens per second of the recipe
`agent`, over those of `tools`, whose environment is a class that says the same; or of
`smollm2_tools`, played by a program and by its class.

Each side is a run of its own, in turn, of the same model, rows and steps; see `environments.speed`.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.environments import speed
from benchmarks.training import calculating
from benchmarks.training.train import QUIET, repeated, train
from rhymeflow.config.load import read_config

LEAST = 0.9
PLAYED = {
    "environment.agent": f"{calculating.__file__}:solve",
    "environment.tools": "[]",
    "data.system_prompt": "null",
    "data.few_shot": "[]",
}
"""Fields of `smollm2_tools` with which a program plays it."""
SIDES: dict[str, dict[str, tuple[str, dict[str, str]]]] = {
    "tiny": {"agent": ("agent", {}), "tools": ("tools", {})},
    "smollm2": {"agent": ("smollm2_tools", PLAYED), "tools": ("smollm2_tools", {})},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_number(parser, "--repeats", 3, "pairs of runs")
    harness.add_number(parser, "--steps", 6, "of each run")
    parser.add_argument("--policy", choices=list(SIDES), default="tiny", help="default: tiny")


def run(args: argparse.Namespace) -> dict[str, Any]:
    sides = {
        name: partial(trained, recipe, {**fields, "learner.max_steps": str(args.steps)})
        for name, (recipe, fields) in SIDES[args.policy].items()
    }
    rows, speeds = [], []
    for name, runs in repeated(sides, args.repeats, lambda run: run[0]).items():
        tokens, answers = zip(*runs, strict=True)
        speeds.append(tokens)
        row = harness.side_row(name, tokens, "tokens/s")
        rows.append(row | harness.spread("s an answer", answers, 4))
    ratio = harness.median_ratio(*speeds)
    targets = [harness.Target("agents/tokens-per-s", ratio, LEAST)]
    record = "agents" if args.policy == "tiny" else f"agents-{args.policy}"
    return harness.report(record, rows, targets, args)


def trained(recipe: str, fields: dict[str, str], _: int, run_dir: Path) -> tuple[float, float]:
    """Trained tokens per second, and the mean seconds until a turn was answered by another call or
    by the calculator."""
    train(read_config(recipe, {**QUIET, **fields, "run.output_dir": str(run_dir)}))
    return speed(run_dir)
