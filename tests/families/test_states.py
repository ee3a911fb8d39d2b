"""Layers that carry a state: it ends with each sequence of a packed row."""

import copy

import pytest
import torch

from rhymeflow.config import LearnerConfig, LoraConfig, ModelConfig, RolloutConfig
from rhymeflow.learner.logprobs import recompute_layers
from rhymeflow.learner.packing import pack
from rhymeflow.learner.policy import proved_scorer
from rhymeflow.models import state
from rhymeflow.models.adapter_files import adapter_of
from rhymeflow.models.families import FAMILIES
from rhymeflow.models.load import check_native
from rhymeflow.models.lora import attach, draw_adapter, merge
from tests.families.cases import STATES, eager, model_of, save
from tests.families.checks import (
    TOLERANCE,
    backward,
    batch,
    check_engine,
    check_learner,
    gradients,
    load,
)
from tests.refused import refusal


@pytest.mark.parametrize("name", STATES)
def test_the_learner_computes_the_model_and_the_native_engine_refuses_it(name, tmp_path):
    save(name, tmp_path)
    model, plain, config = load(tmp_path), eager(tmp_path), ModelConfig(name=str(tmp_path))
    if "attention alone" in name:
        check_native(config)
        check_engine(model, plain)
    else:
        assert "has layers that carry a state from token to token" in refusal(check_native, config)
        kinds = {type(module).__name__ for module in model.modules()}
        assert FAMILIES[name.split()[0]].state in kinds
    check_learner(model, plain)


@torch.no_grad()
@pytest.mark.parametrize("name", STATES)
def test_an_adapter_has_its_effect_wherever_it_is(name):
    """As if added to the weights; code that uses a layer's weight without calling it ignores it."""
    model = attach(model_of(name), adapter_of(LoraConfig(rank=2)))
    draw_adapter(model)
    model.set_attn_implementation("eager")
    ids = torch.tensor([[3, 17, 5, 99, 40, 2, 8, 8, 61]])
    found = model(input_ids=ids, use_cache=False).logits
    expected = merge(model)(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


ONE_OF_EACH = ("falcon_h1", "jamba", "lfm2", "qwen3_next")
"""Two kinds of state spaces, a convolution alone, the delta rule."""


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_nothing_of_a_sequence_reaches_another(name, tmp_path):
    """What one sample's log-probabilities depend on: exactly 0 outside it, and not 0 in it."""
    save(name, tmp_path)
    model, samples, chosen = load(tmp_path), batch(), 2
    (row,) = pack(samples, range(len(samples)), 10**6)
    end = sum(row.lengths[: chosen + 1])
    weight_R = torch.zeros(len(row.targets_R))
    weight_R[end - row.lengths[chosen] : end] = 1.0
    scorer = proved_scorer(model, RolloutConfig(), LearnerConfig(max_steps=1))
    embedded = []

    def keep(module, inputs, output):
        output.retain_grad()
        embedded.append(output)

    model.get_input_embeddings().register_forward_hook(keep)
    scorer.backward(row, lambda logprob_C, chunk: (logprob_C * weight_R[chunk]).sum())
    gradient_T = embedded[0].grad[0].abs().amax(1)
    places = torch.from_numpy(row.sequences[chosen])
    assert (gradient_T[places[: len(samples[chosen].prompt_ids)]] > 0.0).all()
    gradient_T[places] = 0.0
    assert gradient_T.max() == 0.0


def test_without_a_reset_the_proof_refuses_the_model(tmp_path, monkeypatch):
    save("lfm2", tmp_path)  # its state is the shortest
    monkeypatch.setattr(state, "reset_at_boundaries", lambda model: None)
    message = refusal(proved_scorer, load(tmp_path), RolloutConfig(), LearnerConfig(max_steps=1))
    assert "the learner's log-probabilities are" in message


def test_copies_have_layers_of_their_own_and_recomputed_ones_are_reset(tmp_path):
    """A reference model is a copy; with gradient checkpointing layers compute twice."""
    save("qwen3_next", tmp_path)
    model, samples = load(tmp_path), batch()
    (row,) = pack(samples, range(len(samples)), 10**6)
    ones_R = torch.ones(len(row.targets_R))
    expected = backward(model, row, ones_R), gradients(model)
    other = copy.deepcopy(model)
    other.zero_grad()
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    scorer = proved_scorer(other, RolloutConfig(), LearnerConfig(max_steps=1))
    recompute_layers(other)
    logprob_R, _ = scorer.backward(row, lambda logprob_C, chunk: logprob_C.sum())
    found = logprob_R, gradients(other)
    # A gradient is up to 250 here, of which processors differ by more than the tolerance.
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=TOLERANCE)
