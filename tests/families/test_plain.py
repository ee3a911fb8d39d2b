"""Types whose layers attend, without a state: engine, learner and transformers compute the same."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from rhymeflow.learner.logprobs import recompute_layers
from rhymeflow.learner.packing import pack
from tests.families.cases import DENSE, EXPERTS, WINDOWS, eager, model_of, save
from tests.families.checks import (
    TOLERANCE,
    backward,
    batch,
    check_engine,
    check_learner,
    gradients,
    load,
)


@pytest.mark.parametrize("name", [*DENSE, *WINDOWS, *EXPERTS])
def test_engine_and_learner_compute_the_model(name, tmp_path):
    save(name, tmp_path)
    model, plain = load(tmp_path), eager(tmp_path)
    check_engine(model, plain)
    check_learner(model, plain)


def test_keys_that_layers_share_are_recomputed_with_their_gradients():
    model = model_of("gemma4_text")
    (row,) = pack(batch(), range(len(batch())), 10**6)
    weight_R = torch.ones(len(row.targets_R))
    expected = backward(model, row, weight_R), gradients(model)
    model.zero_grad()
    recompute_layers(model)
    found = backward(model, row, weight_R), gradients(model)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_without_images_a_model_with_a_part_for_them_is_its_text_model(name, tmp_path):
    save(name, tmp_path)
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(whole(ids).logits, eager(tmp_path)(ids).logits)
