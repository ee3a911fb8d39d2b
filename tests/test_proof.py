"""Families of models: computed as transformers computes them, or refused by name."""

import re

import pytest
import torch

from rhymeflow.config import LearnerConfig, RolloutConfig
from rhymeflow.engine.native.engine import Engine
from rhymeflow.learner.policy import proved_scorer
from rhymeflow.models import attention, lm_head, proof
from tests.families.cases import model_of
from tests.refused import refusal

KINDS = ("llama", "granite", "nanochat", "gpt2", "mistral", "gemma2", "gpt_oss", "deepseek_v3")
"""Of each way to attend and to make logits; `tests/families` has all types."""
WRONG_IN_THE_ENGINE = {"diffllama": "attends more than once in a layer"}


def engine_of(model):
    return Engine(model, seed=0, max_num_seqs=2, max_prefill_tokens=8, instance="a", version=0)


def prove_engine(model):
    engine_of(model).prove()


def prove_learner(model):
    proved_scorer(model, RolloutConfig(temperature=0.5), LearnerConfig(max_steps=1))


PROOFS = prove_engine, prove_learner
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
def test_these_are_computed_as_the_model_does(kind, dtype):
    engine = engine_of(model_of(kind, dtype))
    engine.prove()
    load = engine.load()
    assert (load.num_generated, load.clock, load.prefill_seconds) == (0, 0.0, 0.0)
    prove_learner(model_of(kind, dtype))


@pytest.mark.parametrize("kind", WRONG_IN_THE_ENGINE)
def test_the_learner_computes_these_and_the_engine_refuses_them(kind):
    message = refusal(engine_of(model_of(kind)).prove)
    assert f"a model of type '{kind}' {WRONG_IN_THE_ENGINE[kind]}" in message
    prove_learner(model_of(kind))


def test_a_mask_of_the_models_own_is_refused():
    for prove in PROOFS:
        assert "type 'doge' has attention with attention_mask" in refusal(prove, model_of("doge"))


def test_a_configuration_that_contradicts_the_model_is_refused():
    model = model_of("gpt_bigcode")
    model.config.num_key_value_heads = 2
    assert "has 1 heads of keys of 8" in refusal(prove_engine, model)


@pytest.mark.parametrize("kind", ["cohere", "granite", "nanochat"])
@DTYPES
def test_logits_changed_in_an_unknown_way_are_refused(kind, dtype, monkeypatch):
    monkeypatch.setattr(lm_head, "_scaling", lambda config: (1.0, None))
    for prove in PROOFS:
        message = refusal(prove, model_of(kind, dtype))
        assert f"'{kind}' is not supported: it changes its logits" in message


@pytest.mark.parametrize(
    ("kind", "blind"),
    [
        ("qwen2_moe", {"reach": attention.Reach()}),
        ("llama4_text", {"reach": attention.Reach()}),
        ("gemma2", {"cap": None}),
        ("gpt_oss", {"sink_H": None}),
    ],
)
def test_what_a_layer_asks_for_and_does_not_get_is_noticed(kind, blind, monkeypatch):
    real = attention.Weighing

    class Blind:
        def __new__(cls, *given):
            return real(*given)._replace(**blind)

    for prove in PROOFS:
        monkeypatch.setattr(attention, "Weighing", Blind)
        assert "nats off" in refusal(prove, model_of(kind))


def test_a_longer_window_is_filled(monkeypatch):
    model = model_of("olmo3", sliding_window=30)
    assert [len(ids) for ids, _ in proof.sequences(model)] == [6, 14, 12, 36]
    for prove in PROOFS:
        prove(model)
    real, shorter = attention.Reach.sees, attention.Reach(window=5)
    monkeypatch.setattr(attention.Reach, "sees", lambda _, *places: real(shorter, *places))
    model = model.double()  # whose attention has masks
    for prove in PROOFS:
        assert "nats off" in refusal(prove, model)


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
