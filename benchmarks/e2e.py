"""Whole training runs against another system: trained trajectories per second.

Both sides train the same policy on the same prompts with the same reward, batch, lengths, sampling
and optimizer settings, on the same cores, each in processes of its own, in turn. Counted are the
trajectories of the steps after the first, over the time from the end of the first step to the end
of the last one counted: loading, compiling and filling up are left out on both sides. Here some
more steps follow those counted, so that the rollouts that run ahead at the end of the time weigh
against those that ran ahead at its beginning.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import harness
from rhymeflow.config import Config
from rhymeflow.config.load import dump_config, read_config
from rhymeflow.errors import UserError

ROOT = Path(__file__).resolve().parent.parent

QUIET = {
    "data.eval_size": "0",
    "data.eval_source": "null",
    "run.eval_steps": "0",
    "run.save_steps": "0",
    "run.report_to": "[]",
}
"""Neither side evaluates, saves between steps or reports."""


@dataclass(frozen=True)
class Workload:
    """One comparison: a recipe, how long, and what makes the peer quickest on it."""

    recipe: str
    target: float
    """Ratio to reach."""
    steps: int
    """Steps counted, after the first."""
    repeats: int
    per_device: int
    """TRL's sequences per forward and backward, the quickest of those tried (docs/lab-log.md)."""
    overrides: dict[str, str] = field(default_factory=dict)


WORKLOADS = {
    "demo": Workload("demo", target=5.0, steps=8, repeats=5, per_device=32),
    "smollm2": Workload("smollm2", target=3.0, steps=3, repeats=3, per_device=32),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--peer", choices=["trl"], default="trl", help="the other system")
    parser.add_argument(
        "--workload", choices=list(WORKLOADS), action="append", help="default: all of them"
    )
    parser.add_argument(
        "--repeats", type=harness.positive, help="pairs of runs (default: 5 demo, 3 smollm2)"
    )
    parser.add_argument("--steps", type=harness.positive, help="steps counted after the first")
    parser.add_argument(
        "--cores", type=harness.positive, default=2, help="both sides run on so many"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each workload and report."""
    rows: list[dict[str, Any]] = []
    targets = []
    for name in args.workload or list(WORKLOADS):
        workload = WORKLOADS[name]
        with tempfile.TemporaryDirectory(prefix="rhymeflow-e2e-") as folder:
            comparison = Comparison(workload, args, Path(folder))
            values = harness.interleave(
                {"rhymeflow": comparison.ours, "trl": comparison.trl},
                args.repeats or workload.repeats,
                progress=lambda line, name=name: print(name, line, file=sys.stderr, flush=True),
            )
        for side, measured in values.items():
            row = harness.side_row(side, measured, "trajectories/s")
            rows.append({"workload": name, **row, **comparison.facts(side)})
        ratio = harness.median_ratio(values["rhymeflow"], values["trl"])
        targets.append(harness.Target(f"e2e/trl/{name}", ratio, workload.target))
    return harness.report("e2e", rows, targets, args, notes=NOTES.format(cores=args.cores))


NOTES = (
    "Trained trajectories per second from the end of the first step on; ratios are medians over "
    "pairs run one right after the other. Both on {cores} cores: TRL with a thread on each, here "
    "one for the rollout and one for the learner. TRL: GRPOTrainer with transformers' generate, "
    "without gradient checkpointing, logging or saving, smollm2's weights in bfloat16; float32, "
    "autocast and its continuous batching were slower (docs/lab-log.md)."
)


@dataclass
class Comparison:
    """The two sides of one workload, and what their runs showed besides the rate."""

    workload: Workload
    args: argparse.Namespace
    folder: Path
    seen: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    number: int = 0

    @property
    def steps(self) -> int:
        """Steps counted, after the first."""
        return self.args.steps or self.workload.steps

    def ours(self) -> float:
        """Train here; return trajectories per second."""
        ahead = 1 + self._config(1).schedule.bound
        run_dir = self._fresh("ours")
        config = self._write(1 + self.steps + ahead, {"run.output_dir": str(run_dir)})
        call([sys.executable, "-m", "rhymeflow", "train", str(config)], "e2e", self.args.cores)
        rows = training_rows(run_dir)[: 1 + self.steps]
        lengths = [row["completions/mean_length"] for row in rows]
        return self._rate("rhymeflow", [row["time"] for row in rows], lengths)

    def trl(self) -> float:
        """Train in TRL; return trajectories per second."""
        config, out = self._write(1 + self.steps, {}), self._fresh("trl.json")
        command = [sys.executable, "-m", "benchmarks.peers.trl_side", str(config), str(out)]
        command += ["--threads", str(self.args.cores), "--per-device"]
        call([*command, str(self.workload.per_device)], "e2e", self.args.cores)
        result = json.loads(out.read_text(encoding="utf-8"))
        return self._rate("trl", result["ends"], result["lengths"])

    def facts(self, side: str) -> dict[str, Any]:
        """Return what shows that both sides did the same work."""
        lengths = [run["mean_length"] for run in self.seen[side]]
        return {"mean length": round(sum(lengths) / len(lengths), 1)}

    def _rate(self, side: str, ends: list[float], lengths: list[float]) -> float:
        assert len(ends) == 1 + self.steps, f"{side}: {len(ends)} steps"
        self.seen.setdefault(side, []).append({"mean_length": sum(lengths[1:]) / self.steps})
        config = self._config(1)
        batch = config.learner.groups_per_batch * config.rollout.num_generations
        return self.steps * batch / (ends[-1] - ends[0])

    def _config(self, max_steps: int, more: dict[str, str] | None = None) -> Config:
        overrides = {**QUIET, **self.workload.overrides, "learner.max_steps": str(max_steps)}
        return read_config(self.workload.recipe, {**overrides, **(more or {})})

    def _write(self, max_steps: int, more: dict[str, str]) -> Path:
        path = self._fresh("config.yaml")
        path.write_text(dump_config(self._config(max_steps, more)), encoding="utf-8")
        return path

    def _fresh(self, name: str) -> Path:
        self.number += 1
        return self.folder / f"{self.number}-{name}"


def call(command: list[str], name: str, cores: int | None = None) -> None:
    """Run one side of benchmark `name`, on the first so many cores.

    Raises `UserError` with its last words if it fails.
    """
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        preexec_fn=functools.partial(os.sched_setaffinity, 0, chosen),
    )
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise UserError(f"bench {name}: {' '.join(command[1:4])} failed: {' '.join(last)}")


def training_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl` that tell of a step, in order."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if "completions/mean_length" in row]
