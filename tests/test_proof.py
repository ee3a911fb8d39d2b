"""Families of models: computed as transformers computes them, or refused by name."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rhymeflow.config import LearnerConfig, RolloutConfig
from rhymeflow.engine.native.engine import Engine
from rhymeflow.learner.policy import proved_scorer
from rhymeflow.models import attention, lm_head
from tests.refused import refusal

SIZES = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT = {"num_key_value_heads": None, "head_dim": None}
"""They have as many heads of keys as of queries, and do not say how wide."""
LATENT = {
    **{"num_key_value_heads": 4, "head_dim": None},
    **{"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
    **{"v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
    **{"topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

RIGHT = {
    "llama": {},
    "qwen3": {},
    "cohere": {"logit_scale": 0.0625},
    "granite": {"logits_scaling": 8.0},
    "granitemoe": {"logits_scaling": 8.0, **EXPERTS},
    "hyperclovax": {"logits_scaling": 0.2},
    "nanochat": {"final_logit_softcapping": 3.0},
    "bitnet": {"head_dim": None},
    "gpt2": {**GPT, "n_inner": 48},
    "gpt_neox": GPT,
    "opt": {**GPT, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_bigcode": {**GPT, "multi_query": True},
}
WRONG_IN_THE_ENGINE = {
    "diffllama": "attends more than once in a layer",
    "deepseek_v3": "has 4 heads of keys of 24 and values of 16 numbers instead of the 4 of 8",
    "minicpm3": "has 4 heads of keys of 24 and values of 16 numbers instead of the 4 of 8",
}


def model_of(kind, dtype=torch.float32, **more):
    fields = {name: x for name, x in {**SIZES, **more}.items() if x is not None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[kind](**fields), dtype=dtype, attn_implementation=attention.NAME
    )
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each in model.parameters():  # norms and biases that are no 1 and 0
            each += 0.1 * torch.randn(each.shape, generator=drawn).to(dtype)
    return model.eval()


def engine_of(model):
    return Engine(model, seed=0, max_num_seqs=2, max_prefill_tokens=8, instance="a", version=0)


def prove_engine(model):
    engine_of(model).prove()


def prove_learner(model):
    proved_scorer(model, RolloutConfig(temperature=0.5), LearnerConfig(max_steps=1))


PROOFS = prove_engine, prove_learner
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("kind", RIGHT)
def test_these_are_computed_as_the_model_does(kind, dtype):
    engine = engine_of(model_of(kind, dtype, **RIGHT[kind]))
    engine.prove()
    load = engine.load()
    assert (load.num_generated, load.clock, load.prefill_seconds) == (0, 0.0, 0.0)
    prove_learner(model_of(kind, dtype, **RIGHT[kind]))


@pytest.mark.parametrize("kind", WRONG_IN_THE_ENGINE)
def test_the_learner_computes_these_and_the_engine_refuses_them(kind):
    more = {} if kind == "diffllama" else LATENT
    message = refusal(engine_of(model_of(kind, **more)).prove)
    assert f"a model of type '{kind}' {WRONG_IN_THE_ENGINE[kind]}" in message
    prove_learner(model_of(kind, **more))


def test_a_mask_of_the_models_own_is_refused():
    for prove in PROOFS:
        assert "type 'doge' has attention with attention_mask" in refusal(prove, model_of("doge"))


def test_a_configuration_that_contradicts_the_model_is_refused():
    model = model_of("gpt_bigcode", **GPT)
    model.config.num_key_value_heads = 2
    assert "has 1 heads of keys of 8" in refusal(prove_engine, model)


@pytest.mark.parametrize("kind", ["cohere", "granite", "nanochat"])
@DTYPES
def test_logits_changed_in_an_unknown_way_are_refused(kind, dtype, monkeypatch):
    monkeypatch.setattr(lm_head, "_scaling", lambda config: (1.0, None))
    for prove in PROOFS:
        message = refusal(prove, model_of(kind, dtype, **RIGHT[kind]))
        assert f"'{kind}' is not supported: it changes its logits" in message


@DTYPES
def test_another_scale_of_attention_is_noticed(dtype, monkeypatch):
    """As of a layer that does something else than it is taken for."""
    real = attention._attention_function

    def other(module, query, key, value, mask, scaling=None, **given):
        return real(module, query, key, value, mask, 3 * scaling, **given)

    for prove in PROOFS:
        model = model_of("olmo2", dtype)
        monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, other)
        assert re.search("'olmo2' is not supported: .* nats off", refusal(prove, model))
