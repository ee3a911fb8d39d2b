"""What ranks are asked to do in `test_fsdp2.py`."""

from __future__ import annotations

from pathlib import Path

import torch

from rhymeflow.learner.fsdp2 import ShardedLearner
from rhymeflow.learner.ranks import Ranks
from tests.learner.builders import learner_config, made_up_batch, rollout_config, tiny_model


def sharded_learner(
    ranks: Ranks, *, dtype: torch.dtype = torch.float32, kind: str = "llama", tied=True, **changes
) -> ShardedLearner:
    return ShardedLearner(
        lambda: tiny_model(kind, tied=tied),
        None,
        learner_config(**changes),
        rollout_config(),
        dtype,
        ranks,
    )


def whole_weights(learner: ShardedLearner) -> dict[str, torch.Tensor]:
    gathered = {}
    for block in learner.gathering():
        gathered |= {name: each.clone() for name, each in block.items()}
    return gathered


def train(ranks: Ranks, steps: int, options: dict) -> tuple[list[dict], dict]:
    learner = sharded_learner(ranks, **options)
    rows = [learner.train(made_up_batch(seed=step), step) for step in range(steps)]
    return rows, whole_weights(learner)


def save_and_go_on(ranks: Ranks, directory: Path, steps: int) -> tuple[list[dict], dict]:
    """Save after `steps`, and train as many again."""
    learner = sharded_learner(ranks)
    for step in range(steps):
        learner.train(made_up_batch(seed=step), step)
    snapshot = learner.snapshot()
    rows = [learner.train(made_up_batch(seed=s), s) for s in range(steps, 2 * steps)]
    snapshot.write(directory)  # what came since must not be in it
    return rows, whole_weights(learner)


def restore_and_go_on(ranks: Ranks, directory: Path, steps: int) -> tuple[list[dict], dict]:
    learner = sharded_learner(ranks)
    assert learner.restore(directory) == steps
    rows = [learner.train(made_up_batch(seed=s), s) for s in range(steps, 2 * steps)]
    return rows, whole_weights(learner)
