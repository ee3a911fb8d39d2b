"""One recipe trained with each engine: held-out reward by seed, an instance killed on the way.

Both engines train recipe `smollm2` alike: two instances, bound 1, weights pulled under running
requests, one thread each; once `KILL_AFTER` steps are done an instance is killed, and another takes
its place. Runs are made one by one, engines in turn; with `--record` each is a line of `RUNS` as
soon as it ended, and those that are there are not made again.

Holds true: a run that lost its killed instance's replacement, or trained beyond its bound, raises.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from benchmarks import harness
from benchmarks.faults.processes import kill, of_kind, running
from benchmarks.training.log import read
from benchmarks.training.train import train, training_rows
from rhymeflow.config import Config
from rhymeflow.config.load import read_config
from rhymeflow.models.load import resolve_device, resolve_dtype

RUNS = "vllm-training-runs.jsonl"
KILL_AFTER = 2
"""Steps."""
BOUND = 1
ENGINES: tuple[Literal["native", "vllm"], ...] = ("native", "vllm")


class Trained(msgspec.Struct, frozen=True):
    """A run: a line of the file."""

    engine: str
    seed: int
    steps: int
    dtype: str
    before: float
    """Held-out reward of version 0."""
    after: float
    """Of the last version."""
    mean_mismatch: float
    """Mean over steps of `off_policy/mismatch_kl`."""
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of part `training`."""
    group = parser.add_argument_group("part training")
    harness.add_number(group, "--seeds", 3, "runs of each engine")
    harness.add_number(group, "--steps", 10, "training steps of a run")
    harness.add_number(group, "--new-runs", 100, "at most so many, besides those recorded")


def training(args: argparse.Namespace) -> harness.Found:
    """Make the runs that are missing; report all there are."""
    path = harness.RESULTS / RUNS
    known = [msgspec.json.decode(line, type=Trained) for line in _lines(path)]
    found = [run for run in known if run.steps == args.steps and run.seed < args.seeds]
    made = {(run.engine, run.seed) for run in found}
    missing = [(e, s) for s in range(args.seeds) for e in ENGINES if (e, s) not in made]
    for engine, seed in missing[: args.new_runs]:
        print(f"  {engine}, seed {seed}", file=sys.stderr, flush=True)
        found.append(_train(engine, seed, args.steps, args.vllm_python))
        if args.record:
            with path.open("ab") as lines:
                lines.write(msgspec.json.encode(found[-1]) + b"\n")
    return _rows(found), _targets(found)


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.is_file() else []


def _train(engine: str, seed: int, steps: int, vllm_python: str) -> Trained:
    folder = Path(tempfile.mkdtemp(prefix="rhymeflow-bench-"))
    config = configuration(engine, seed, steps, folder / "run", vllm_python)
    killed: list[int] = []

    def kill_one(run_dir: Path) -> bool:
        if not killed and _num_steps(run_dir) >= KILL_AFTER:
            killed.extend(of_kind(running(), os.getpid(), "rollout")[:1])
            assert killed, "a run that trains has instances"
            assert kill(killed[0]), "it ended by itself"
        return False

    start = time.monotonic()
    train(config, is_enough=kill_one)
    seconds = time.monotonic() - start
    run = read(folder / "run")
    assert killed, f"the run ended before an instance was killed, after {KILL_AFTER} steps"
    assert len(list((folder / "run" / "logs").rglob("rollout-*.log"))) == 3, "none took its place"
    assert run.staleness <= BOUND, f"staleness {run.staleness}"
    rewards = {each.version: each.reward for each in run.evaluations}
    mismatch = [row["off_policy/mismatch_kl"] for row in training_rows(folder / "run")]
    shutil.rmtree(folder)
    dtype = str(resolve_dtype(config.model, resolve_device(config.model)))
    return Trained(
        engine, seed, steps, dtype.removeprefix("torch."), rewards[0], rewards[steps],
        statistics.fmean(mismatch), round(seconds, 1),
    )  # fmt: skip


def _num_steps(run_dir: Path) -> int:
    """Steps whose line is complete."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return sum("completions/mean_length" in line for line in lines)


def configuration(engine: str, seed: int, steps: int, run_dir: Path, vllm_python: str) -> Config:
    """The recipe, on two instances of this engine."""
    fields = {
        "rollout.engine": engine,
        "rollout.num_instances": "2",
        "schedule.max_staleness": str(BOUND),
        "learner.max_steps": str(steps),
        "run.eval_steps": str(steps),
        "run.save_seconds": "0",
        "run.seed": str(seed),
        "run.output_dir": str(run_dir),
    }
    if engine == "vllm":
        fields |= {
            "rollout.python": vllm_python,
            "rollout.vllm_kv_cache_gb": "0.5",
            "rollout.vllm_max_model_length": "512",
        }
    return read_config("smollm2", fields)


def _rows(runs: Sequence[Trained]) -> list[dict[str, Any]]:
    rows = []
    for engine in ENGINES:
        mine = [run for run in runs if run.engine == engine]
        if mine:
            rows.append(
                {
                    "part": "training",
                    "engine": engine,
                    "runs": len(mine),
                    "steps": mine[0].steps,
                    "dtype": mine[0].dtype,
                    "held out before": round(statistics.fmean(run.before for run in mine), 3),
                    **harness.spread("held out after", [run.after for run in mine], 3),
                    "mismatch_kl": f"{statistics.fmean(run.mean_mismatch for run in mine):.1e}",
                    "s a run": round(statistics.median(run.seconds for run in mine)),
                }
            )
    return rows


def _targets(runs: Sequence[Trained]) -> list[harness.Target]:
    """How far apart the engines' means are, in widths of the wider band of seeds."""
    after = [[run.after for run in runs if run.engine == engine] for engine in ENGINES]
    if min(map(len, after)) < 2:
        return []
    band = max(max(each) - min(each) for each in after)
    apart = abs(statistics.fmean(after[0]) - statistics.fmean(after[1]))
    value = round(apart / max(band, 1e-9), 3)
    return [harness.Target("vllm/training/apart", value, 1.0, at_most=True)]


__all__ = ["add_arguments", "training"]
