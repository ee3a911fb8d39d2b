"""LongRoPE: a response is the same whatever is computed beside it; the run chooses the factors."""

import numpy as np
import pytest
import torch

from rhymeflow.config import Config
from rhymeflow.errors import UserError
from rhymeflow.learner.logprobs import TokenScorer
from rhymeflow.learner.packing import pack
from rhymeflow.learner.sample import Sample
from rhymeflow.models.rope import fix_longrope
from tests.engine.models import make_engine, make_requests, run, sampling
from tests.learner.builders import tiny_model

ORIGINAL = 32
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.3 * i for i in range(8)],
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def model_of(rope, context=128):
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    more = {"vocab_size": 67, "max_position_embeddings": context, "rope_parameters": rope}
    return tiny_model(tied=False, **heads, **more)


def layered_model():
    """LongRoPE in the layers of full attention only."""
    kinds = {"full_attention": LONG, "sliding_attention": {"rope_type": "default"}}
    more = {"sliding_window": 64, "layer_types": [*kinds], "head_dim": 16, "vocab_size": 67}
    return tiny_model(
        "gemma3_text", tied=False, max_position_embeddings=128, rope_parameters=kinds, **more
    )


def config_of(prompt=None, response=16, **rollout):
    return Config.model_validate(
        {
            "data": {"max_prompt_length": prompt},
            "rollout": {"max_completion_length": response, **rollout},
        }
    )


@pytest.mark.parametrize("limit", [None, 10])
@pytest.mark.parametrize("made_by", [lambda: model_of(LONG), layered_model])
def test_neighbours_in_the_engine_do_not_matter(limit, made_by):
    model, found = fix_longrope(made_by(), config_of(limit)), []
    for neighbours in ([], [60]):
        engine = make_engine(model, max_prefill_tokens=512)
        engine.prove()
        requests = make_requests([10, *neighbours], sampling(max_new_tokens=8))
        for request in requests:
            request.prompt_ids = [token % 67 for token in request.prompt_ids]
        run(engine, requests)
        found.append((requests[0].tokens, requests[0].logprobs))
    assert found[0][0] == found[1][0]
    # A product of one row and one of two may round differently, by the processor.
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-5)


def test_neighbours_in_the_learner_do_not_matter():
    def sample(prompt):
        ids = [5 + 3 * j % 50 for j in range(prompt)]
        return Sample(prompt, ids, [7, 9, 4], [0.0] * 3, [0] * 3, 0.0, False)

    config = config_of()
    scorer = TokenScorer(fix_longrope(model_of(LONG), config), config.rollout, 64)
    (alone,), (both,) = (pack([sample(10), sample(60)], members, 1000) for members in ([0], [0, 1]))
    found = scorer.score(both)[0][:3]
    assert np.allclose(found, scorer.score(alone)[0], rtol=0, atol=1e-6)


def test_the_greatest_length_of_the_run_decides():
    def is_long(config):
        model = fix_longrope(model_of(LONG), config)
        with torch.no_grad():
            model.model.rotary_emb(torch.zeros(1), torch.tensor([[0]]))
        return bool(model.model.rotary_emb.inv_freq[0] < 0.7)

    assert is_long(config_of())
    assert not is_long(config_of(ORIGINAL - 16))
    assert is_long(config_of(ORIGINAL - 15))
    suites = {"suites": [{"name": "a", "max_completion_length": 17}]}
    longer = Config.model_validate({**config_of(ORIGINAL - 16).model_dump(), "eval": suites})
    assert is_long(longer)
    assert is_long(config_of(8, engine="vllm"))  # vLLM does not know the prompts' limit
    assert not is_long(config_of(8, engine="vllm", vllm_max_model_length=ORIGINAL))


def test_vllm_scales_attention_by_the_lengths_alone():
    other = model_of({**LONG, "factor": 2.0})  # where 128 is 4 times 32
    fix_longrope(other, config_of())
    with pytest.raises(UserError, match=r"attention by 1.0954, but vLLM would scale it by 1.18"):
        fix_longrope(other, config_of(engine="vllm"))


def test_dynamic_rope_does_not_leave_the_length_it_was_made_for():
    with pytest.raises(UserError, match="more than the model's max_position_embeddings = 24"):
        run(make_engine(model_of(DYNAMIC, 24)), make_requests([17], sampling(max_new_tokens=8)))
