"""Engine and learner give the same log-probability to every token: no hidden off-policyness."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rhymeflow.config import RolloutConfig
from rhymeflow.engine.base import NoiseKey, Request, Sampling
from rhymeflow.engine.native.engine import Engine
from rhymeflow.learner.logprobs import TokenScorer
from rhymeflow.learner.packing import pack
from rhymeflow.learner.sample import Sample
from tests.engine.models import tiny_model


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.3, "top_k": 9},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    ],
    ids=str,
)
def test_the_learner_scores_what_the_engine_sampled_alike(kind, how):
    model = tiny_model(kind)
    rollout = RolloutConfig(max_completion_length=40, **how)
    sampling = Sampling(rollout.temperature, rollout.top_p, rollout.top_k, 40, frozenset({3}))
    engine = Engine(model, seed=1, max_num_seqs=5, max_prefill_tokens=64, instance="a", version=0)
    for i in range(12):
        prompt = [(7 * i + j) % 150 for j in range(1 + 3 * (i % 4))]
        engine.submit(Request(i, prompt, NoiseKey(i, 0, 0), sampling))
    done = []
    while engine.has_work:
        done += engine.step()
    batch = [
        Sample(
            group=i,
            prompt_ids=request.prompt_ids,
            completion_ids=request.tokens,
            logprobs=request.logprobs,
            versions=[0] * len(request.tokens),
            reward=0.0,
            truncated=reason == "length",
        )
        for i, (request, reason) in enumerate(done)
    ]
    assert len({len(sample.completion_ids) for sample in batch}) > 1, "not ragged"
    (row,) = pack(batch, range(len(batch)), 10**6)
    scored, _ = TokenScorer(model, rollout, chunk_size=17).score(row)
    sampled = np.concatenate([sample.logprobs for sample in batch])
    torch.testing.assert_close(
        scored, torch.tensor(sampled, dtype=torch.float32), atol=1e-4, rtol=0
    )
