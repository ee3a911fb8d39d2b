"""Whole training runs against another system: trained trajectories per second.

Both sides train the same policy on the same prompts with the same reward, batch, lengths, sampling
and optimizer settings, on the same cores, each in processes of its own, interleaved. Counted are
the trajectories of the steps after the first, over the time from the end of the first step to the
end of the last counted one: loading, compiling and warming up are left out on both sides. Ours does
some more steps than are counted, so that the rollouts in progress at the end of the time weigh
against those that were in progress at its beginning.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.training.train import QUIET, call, train, training_rows
from rhymeflow.config import Config
from rhymeflow.config.load import dump_config, read_config


@dataclass(frozen=True)
class Workload:
    """One comparison."""

    target: float
    """Ratio to reach."""
    steps: int
    """Steps counted, after the first."""
    repeats: int


WORKLOADS = {
    "demo": Workload(target=5.0, steps=8, repeats=5),
    "smollm2": Workload(target=3.0, steps=3, repeats=3),
}
"""By recipe."""
NUM_CORES = 2
"""That both sides run on."""
PER_DEVICE = 32
"""TRL's sequences per forward and backward, the fastest of those tried (docs/lab-log.md)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--peer", choices=["trl"], default="trl", help="the other system")
    harness.add_choice(parser, "--workload", WORKLOADS)
    harness.add_number(parser, "--repeats", None, "pairs of runs (default: 5 demo, 3 smollm2)")
    harness.add_number(parser, "--steps", None, "counted after the first (default: 8 and 3)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each workload and report."""
    rows: list[dict[str, Any]] = []
    targets = []
    for name in args.workload or list(WORKLOADS):
        workload = WORKLOADS[name]
        with tempfile.TemporaryDirectory(prefix="rhymeflow-e2e-") as folder:
            comparison = Comparison(name, args.steps or workload.steps, Path(folder))
            both = {"rhymeflow": comparison.ours, "trl": comparison.trl}
            values = harness.interleave(both, args.repeats or workload.repeats, name)
        for side, measured in values.items():
            row = harness.side_row(side, measured, "trajectories/s")
            length = statistics.fmean(comparison.lengths[side])  # both sides did the same work
            rows.append({"workload": name, **row, "mean length": round(length, 1)})
        ratio = harness.median_ratio(values["rhymeflow"], values["trl"])
        targets.append(harness.Target(f"e2e/trl/{name}", ratio, workload.target))
    return harness.report("e2e", rows, targets, args, notes=NOTES.format(cores=NUM_CORES))


NOTES = (
    "Trained trajectories per second from the end of the first step on; ratios are medians over "
    "pairs run one right after the other. Both on {cores} cores: TRL with a thread on each, here "
    "one for the rollout and one for the learner. TRL: GRPOTrainer with transformers' generate, "
    "without gradient checkpointing, logging or saving, smollm2's weights in bfloat16; float32, "
    "autocast and its continuous batching were slower (docs/lab-log.md)."
)


class Comparison:
    """The two sides of one workload, and the mean lengths of their responses."""

    def __init__(self, recipe: str, steps: int, folder: Path) -> None:
        self.recipe, self.steps, self.folder = recipe, steps, folder
        self.lengths: dict[str, list[float]] = {"rhymeflow": [], "trl": []}

    def ours(self) -> float:
        """Train here; return trajectories per second."""
        ahead = 1 + self._config(1).schedule.bound
        config = self._config(1 + self.steps + ahead, "rhymeflow")
        rows = training_rows(train(config, num_cores=NUM_CORES))[: 1 + self.steps]
        lengths = [row["completions/mean_length"] for row in rows]
        return self._rate("rhymeflow", [row["time"] for row in rows], lengths)

    def trl(self) -> float:
        """Train in TRL; return trajectories per second."""
        config = self.folder / "trl.yaml"
        config.write_text(dump_config(self._config(1 + self.steps)), encoding="utf-8")
        out = self.folder / "trl.json"
        command = [sys.executable, "-m", "benchmarks.peers.trl_side", str(config), str(out)]
        command += ["--threads", str(NUM_CORES), "--per-device", str(PER_DEVICE)]
        call(command, num_cores=NUM_CORES)
        result = json.loads(out.read_text(encoding="utf-8"))
        out.unlink()
        return self._rate("trl", result["ends"], result["lengths"])

    def _rate(self, side: str, ends: list[float], lengths: list[float]) -> float:
        assert len(ends) == 1 + self.steps, f"{side}: {len(ends)} steps"
        self.lengths[side].append(statistics.fmean(lengths[1:]))
        config = self._config(1)
        batch = config.learner.groups_per_batch * config.rollout.num_generations
        return self.steps * batch / (ends[-1] - ends[0])

    def _config(self, max_steps: int, side: str = "trl") -> Config:
        run_dir = self.folder / f"{side}-{len(self.lengths[side])}"
        fields = {"learner.max_steps": str(max_steps), "run.output_dir": str(run_dir)}
        return read_config(self.recipe, {**QUIET, **fields})
