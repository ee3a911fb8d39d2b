"""Engine and learner give the same log-probability to every token: no hidden off-policyness.

In bfloat16 their bodies differ by rounding, since they multiply other numbers of rows; their heads
must add nothing to it."""

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rhymeflow.config import RolloutConfig
from rhymeflow.engine.base import NoiseKey, Request, Sampling
from rhymeflow.engine.native.engine import Engine
from rhymeflow.learner.logprobs import TokenScorer
from rhymeflow.learner.packing import pack
from rhymeflow.learner.sample import Sample
from rhymeflow.models.lm_head import LMHead
from tests.engine.models import tiny_model


def sampled(
    model: PreTrainedModel, rollout: RolloutConfig, prompts: list[list[int]], stop: frozenset[int]
) -> list[Sample]:
    """A response of the engine to each prompt."""
    sampling = Sampling(
        rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_completion_length, stop
    )
    engine = Engine(model, seed=1, max_num_seqs=5, max_prefill_tokens=64, instance="a", version=0)
    for i, prompt in enumerate(prompts):
        engine.submit(Request(i, prompt, NoiseKey(i, 0, 0), sampling))
    done = []
    while engine.has_work:
        done += engine.step()
    return [
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


def scored(model: PreTrainedModel, rollout: RolloutConfig, batch: list[Sample]) -> torch.Tensor:
    """What the learner makes of the responses, one after the other."""
    (row,) = pack(batch, range(len(batch)), 10**6)
    return TokenScorer(model, rollout, chunk_size=17).score(row)[0]


def behaviour(batch: list[Sample]) -> torch.Tensor:
    """What the engine said of them."""
    return torch.tensor(np.concatenate([sample.logprobs for sample in batch]), dtype=torch.float32)


def difference(model: PreTrainedModel, rollout: RolloutConfig, batch: list[Sample]) -> float:
    """Mean |learner - engine| of log-probabilities in nats."""
    return float((scored(model, rollout, batch) - behaviour(batch)).abs().mean())


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
    prompts = [[(7 * i + j) % 150 for j in range(1 + 3 * (i % 4))] for i in range(12)]
    batch = sampled(model, rollout, prompts, frozenset(range(3, 150, 31)))
    assert len({len(sample.completion_ids) for sample in batch}) > 1, "not ragged"
    torch.testing.assert_close(scored(model, rollout, batch), behaviour(batch), atol=1e-4, rtol=0)


def test_in_bfloat16_the_learner_s_head_adds_nothing():
    """Of bodies that add nothing, so that they cannot differ."""
    model = tiny_model("llama").bfloat16()
    with torch.no_grad():
        model.get_output_embeddings().weight *= 4  # logits of 20 or so, as real ones
        for layer in model.base_model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    rollout = RolloutConfig(max_completion_length=40)
    prompts = [[(7 * i + j) % 150 for j in range(1 + 3 * (i % 4))] for i in range(12)]
    batch = sampled(model, rollout, prompts, frozenset())
    assert difference(model, rollout, batch) < 1e-4
    exact = LMHead.logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LMHead, "logits", lambda *args: exact(*args).bfloat16().float())
        assert difference(model, rollout, batch) > 1e-3, "this test would not notice"
