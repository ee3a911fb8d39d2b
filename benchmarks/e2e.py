"""Whole training runs against another system: trained trajectories per second.

Both sides train the same policy on the same prompts with the same settings, on the same cores, in
turn. Counted are the trajectories of the steps after the first, over the time from its end. Ours
does some more steps than are counted, so that rollouts in progress at both ends weigh alike.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.training.train import QUIET, call, repeated, train, training_rows
from rhymeflow.config import Config
from rhymeflow.config.load import dump_config, read_config


class Workload(NamedTuple):
    target: float
    steps: int
    """Counted, after the first."""
    repeats: int


WORKLOADS = {
    "demo": Workload(target=8.0, steps=8, repeats=5),
    "smollm2": Workload(target=4.0, steps=3, repeats=3),
}
"""By recipe."""
NUM_CORES = 2
"""That both sides run on."""
PER_DEVICE = 32
"""TRL's sequences per forward and backward, the fastest of those tried (docs/lab-log.md)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer", choices=["trl"], default="trl", help="the other system")
    harness.add_choice(parser, "--workload", WORKLOADS)
    harness.add_number(parser, "--repeats", None, "pairs of runs (default: 5 demo, 3 smollm2)")
    harness.add_number(parser, "--steps", None, "counted after the first (default: 8 and 3)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    targets = []
    for name in args.workload or WORKLOADS:
        workload = WORKLOADS[name]
        sides = {
            side: functools.partial(measure, name, args.steps or workload.steps)
            for side, measure in (("rhymeflow", train_here), ("trl", train_in_trl))
        }
        found = repeated(sides, args.repeats or workload.repeats, lambda run: run[0])
        speeds = {}
        for side, runs in found.items():
            speeds[side], lengths = zip(*runs, strict=True)
            row = harness.side_row(side, speeds[side], "trajectories/s")
            length = statistics.fmean(lengths)  # both did the same work
            rows.append({"workload": name, **row, "mean length": round(length, 1)})
        ratio = harness.median_ratio(speeds["rhymeflow"], speeds["trl"])
        targets.append(harness.Target(f"e2e/trl/{name}", ratio, workload.target))
    return harness.report("e2e", rows, targets, args, NOTES)


NOTES = (
    "Trained trajectories per second from the end of the first step on; ratios are medians over "
    f"pairs run one right after the other. Both on {NUM_CORES} cores: TRL with a thread on each, "
    "here one for the rollout and one for the learner. TRL: GRPOTrainer with transformers' "
    "generate, without gradient checkpointing, logging or saving, smollm2's weights in bfloat16, "
    "the demo's in float32 without autocast; what else was tried was slower (docs/lab-log.md)."
)


def train_here(recipe: str, steps: int, _: int, run_dir: Path) -> tuple[float, float]:
    ahead = 1 + configuration(recipe, 1, run_dir).schedule.bound
    config = configuration(recipe, 1 + steps + ahead, run_dir)
    rows = training_rows(train(config, num_cores=NUM_CORES))[: 1 + steps]
    lengths = [row["completions/mean_length"] for row in rows]
    return measured(config, steps, [row["time"] for row in rows], lengths)


def train_in_trl(recipe: str, steps: int, _: int, run_dir: Path) -> tuple[float, float]:
    config = configuration(recipe, 1 + steps, run_dir)
    path, out = (run_dir.with_suffix(suffix) for suffix in (".yaml", ".json"))
    path.write_text(dump_config(config), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.peers.trl_side", str(path), str(out)]
    command += ["--threads", str(NUM_CORES), "--per-device", str(PER_DEVICE)]
    call(command, num_cores=NUM_CORES)
    result = json.loads(out.read_text(encoding="utf-8"))
    return measured(config, steps, result["ends"], result["lengths"])


def measured(
    config: Config, steps: int, ends: list[float], lengths: list[float]
) -> tuple[float, float]:
    """Trajectories per second and mean length of a run, without its first step."""
    assert len(ends) == 1 + steps, f"{len(ends)} steps"
    batch = config.learner.groups_per_batch * config.rollout.num_generations
    return steps * batch / (ends[-1] - ends[0]), statistics.fmean(lengths[1:])


def configuration(recipe: str, max_steps: int, run_dir: Path) -> Config:
    fields = {"learner.max_steps": str(max_steps), "run.output_dir": str(run_dir)}
    return read_config(recipe, {**QUIET, **fields})
