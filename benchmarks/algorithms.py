"""Whether each algorithm learns: the held-out reward of the demo before and after a few steps.

The recipe's settings, and of an algorithm those that are published with it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.training.train import train
from rhymeflow.config.algorithms import ALGORITHMS
from rhymeflow.config.load import read_config
from rhymeflow.observe import metrics

STEPS = 10
RISES = 0.1
"""Held-out reward that a run has to gain; that of 128 prompts has a standard error of 0.04."""
MORE = {"ppo": {"learner.critic_learning_rate": "1e-4"}}
"""Settings without which an algorithm would need more steps."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_choice(parser, "--algorithm", ALGORITHMS)
    harness.add_number(parser, "--steps", STEPS, "steps of a run")


def run(args: argparse.Namespace) -> dict[str, Any]:
    rows = [learned(name, args.steps) for name in args.algorithm or ALGORITHMS]
    learn = sum(row["gain"] >= RISES for row in rows)
    targets = [harness.Target("algorithms/learn", learn, len(rows))]
    return harness.report("algorithms", rows, targets, args, __doc__ or "")


def learned(algorithm: str, steps: int) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rhymeflow-bench-") as folder:
        fields = {
            "learner.algorithm": algorithm,
            "learner.max_steps": str(steps),
            "run.eval_steps": str(max(1, steps // 2)),
            "run.report_to": "[]",
            "run.save_seconds": "0",
            "run.output_dir": str(Path(folder) / "run"),
            **MORE.get(algorithm, {}),
        }
        read = metrics.read(train(read_config("demo", fields)))
    rewards = {step: row["eval/reward"] for step, row in read.items() if "eval/reward" in row}
    found = {f"after {step}": round(reward, 3) for step, reward in sorted(rewards.items())}
    gain = round(rewards[max(rewards)] - rewards[min(rewards)], 3)
    row = {"algorithm": algorithm, **found, "gain": gain}
    print(f"  {row}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return row
