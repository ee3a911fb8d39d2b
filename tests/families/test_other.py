"""Types with other attention, logits or layers: computed as by transformers, or refused by name."""

import pytest

from rhymeflow.config import ModelConfig
from rhymeflow.models.families import FAMILIES
from rhymeflow.models.load import check_native
from tests.families.cases import OTHER, eager, save
from tests.families.checks import check_engine, check_learner, check_turns, load
from tests.refused import refusal


@pytest.mark.parametrize("name", OTHER)
def test_engine_and_learner_compute_the_model(name, tmp_path):
    save(name, tmp_path)
    model, plain = load(tmp_path), eager(tmp_path)
    reason, config = FAMILIES[name.split()[0]].not_native, ModelConfig(name=str(tmp_path))
    if reason is None:
        check_native(config)
        check_engine(model, plain)
    else:
        message = refusal(check_native, config)
        assert reason in message
        assert "set rollout.engine = 'vllm'" in message
    check_learner(model, plain)


@pytest.mark.parametrize("name", ["gpt2", "granite", "persimmon"])
def test_the_engine_goes_on_with_a_cache_after_a_turn(name, tmp_path):
    save(name, tmp_path)
    check_turns(load(tmp_path), eager(tmp_path))
