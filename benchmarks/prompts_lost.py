"""Which prompts a killed run has trained on: of one epoch, with TRL's `GRPOTrainer` beside it.

The run is killed with all its processes after given steps, and resumed as its users do it. Each
prompt of the epoch should be trained on once, however long its responses are. Of TRL's steps those
count that the last weights come from: what came after a checkpoint is done again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.faults.plan import Fault
from benchmarks.faults.run import run_with_faults
from benchmarks.training.train import ROOT
from rhymeflow.config import Config
from rhymeflow.config.load import dump_config, read_config
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import EVENTS

PROMPTS, GROUPS, MEMBERS = 96, 8, 4
"""Of the epoch; of a batch; responses to a prompt."""
STEPS = PROMPTS // GROUPS
KILLED_AFTER = (2, 4, 5, 8, 10)
SAVED_EVERY = 3
BOUNDS = (0, 1, 3)
_TRAINED = (
    """SELECT row, COUNT(*) FROM groups WHERE ending = 'consumed' AND epoch = 0 GROUP BY row"""
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for bound in BOUNDS:
        with tempfile.TemporaryDirectory(prefix="rhymeflow-bench-") as folder:
            rows.append({"side": f"rhymeflow, bound {bound}", **ours(bound, Path(folder))})
    with tempfile.TemporaryDirectory(prefix="rhymeflow-bench-") as folder:
        rows.append({"side": "TRL 1.16, GRPOTrainer", **trls(Path(folder))})
    targets = [
        harness.at_most(f"prompts_lost/{row['side']}: {what}", row[what], 0)
        for row in rows
        if row["side"].startswith("rhymeflow")
        for what in ("never", "twice")
    ]
    return harness.report("prompts_lost", rows, targets, args, notes())


def configure(bound: int, folder: Path) -> Config:
    fields = {
        "data.size": str(PROMPTS),
        "data.eval_size": "0",
        "rollout.num_generations": str(MEMBERS),
        "learner.groups_per_batch": str(GROUPS),
        "learner.max_steps": str(STEPS),
        "schedule.max_staleness": str(bound),
        "run.eval_steps": "0",
        "run.report_to": "[]",
        "run.save_seconds": "0",
        "run.save_steps": str(SAVED_EVERY),
        "run.output_dir": str(folder / "run"),
    }
    return read_config("demo", fields)


def ours(bound: int, folder: Path) -> dict[str, Any]:
    config = configure(bound, folder)
    plan = [Fault(step, 0.0, "controller") for step in KILLED_AFTER]
    found = run_with_faults(config, plan)
    with closing(TrajectoryReader(folder / "run" / EVENTS)) as reader:
        trained = dict(reader.query(_TRAINED))
        made = reader.query("SELECT COUNT(*) FROM groups WHERE epoch = 0")[0][0]
    said = counted(trained)
    return {**said, "kills": len(found.faults), "asked": made, "audit": len(found.violations)}


def counted(trained: Mapping[int, int]) -> dict[str, int]:
    """How many prompts were trained on never, and twice or more."""
    never = PROMPTS - len(trained)
    return {"never": never, "twice": sum(count > 1 for count in trained.values())}


# -- TRL -------------------------------------------------------------------------------------------


def trls(folder: Path) -> dict[str, Any]:
    config, log = configure(0, folder), folder / "steps.jsonl"
    path = folder / "run.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    kills = 0
    for step in (*KILLED_AFTER, 0):
        command = [sys.executable, "-m", "benchmarks.prompts_lost", str(path), str(log), str(step)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode == -signal.SIGKILL:
            kills += 1
        elif done.returncode:
            raise SystemExit(done.stderr[-2000:])
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    last = dict(steps)  # what was done again replaces the first time
    trained = Counter(row for rows in last.values() for row in rows)
    asked = sum(len(rows) for _, rows in steps)
    return {**counted(trained), "kills": kills, "asked": asked}


def train_by_trl(path: str, log: str, killed_after: int) -> None:
    """Train in TRL from the newest checkpoint, and be killed after a step; 0: to the end."""
    from transformers import TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint

    from benchmarks.peers import trl_side

    config = read_config(path)
    folder = str(Path(path).parent / "trl")
    _, trainer = trl_side.build(config, folder, GROUPS * MEMBERS)
    trainer.args.save_strategy, trainer.args.save_steps = "steps", SAVED_EVERY
    judge = trainer.reward_funcs[0]

    def noting(completions: list[str], row: list[int], **columns: Any) -> Any:
        with Path(log).open("a", encoding="utf-8") as file:
            file.write(json.dumps([trainer.state.global_step, sorted({*row})]) + "\n")
        return judge(completions=completions, row=row, **columns)

    class Killed(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step > killed_after > 0:
                os.kill(os.getpid(), signal.SIGKILL)

    trainer.reward_funcs = [noting]
    trainer.add_callback(Killed())
    last = get_last_checkpoint(folder) if Path(folder).is_dir() else None
    trainer.train(resume_from_checkpoint=last)


def notes() -> str:
    kills = ", ".join(map(str, KILLED_AFTER))
    return (
        f"The demo, one epoch of {PROMPTS} prompts in {STEPS} steps, {MEMBERS} responses each, on "
        f"two cores; killed with all processes after steps {kills}; a checkpoint every "
        f"{SAVED_EVERY} steps. `never`, `twice`: prompts that were trained on so often. `asked`: "
        "how many prompts responses were generated for, repetitions included."
    )


if __name__ == "__main__":
    train_by_trl(sys.argv[1], sys.argv[2], int(sys.argv[3]))
