"""A learner of many ranks is the learner of one, however batches, rows and tensors are cut."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.learner import rank_jobs
from tests.learner.builders import made_up_batch, tiny_learner, tiny_model
from tests.learner.rank_pool import on_ranks

STEPS = 20
TIMES = {"step_time"}


def alone(steps: int, options: dict) -> tuple[list[dict], dict]:
    model = tiny_model(options.pop("kind", "llama"), tied=options.pop("tied", True))
    learner = tiny_learner(model=model, **options)
    rows = [learner.train(made_up_batch(seed=step), step) for step in range(steps)]
    return rows, learner.weights()


def same(found: dict, expected: dict, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) < tolerance, name


def same_rows(found: list[dict], expected: list[dict], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in other.keys() - TIMES:
            assert one[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), name


VARIANTS = [
    {},
    {
        "kind": "qwen2",
        "tied": False,
        "beta": 0.1,
        "num_minibatches": 2,
        "num_iterations": 2,
        "max_tokens_per_microbatch": 33,
        "logits_chunk_size": 7,
        "gradient_checkpointing": True,
    },
]


@pytest.mark.parametrize("options", VARIANTS, ids=["plain", "everything"])
def test_twenty_steps_on_two_ranks_are_those_of_one(options: dict):
    (rows, weights), _ = on_ranks(2, rank_jobs.train, STEPS, options)
    expected_rows, expected = alone(STEPS, dict(options))
    same_rows(rows, expected_rows, 1e-5)
    same(weights, expected, 1e-5)
    begun = tiny_model().state_dict()
    assert max(float((expected[n] - begun[n]).abs().max()) for n in begun if n in expected) > 1e-3
