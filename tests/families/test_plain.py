"""Types whose layers attend, without a state: engine, learner and transformers compute the same."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.families.cases import DENSE, EXPERTS, WINDOWS, eager, save
from tests.families.checks import check_engine, check_learner, load


@pytest.mark.parametrize("name", [*DENSE, *WINDOWS, *EXPERTS])
def test_engine_and_learner_compute_the_model(name, tmp_path):
    save(name, tmp_path)
    model, plain = load(tmp_path), eager(tmp_path)
    check_engine(model, plain)
    check_learner(model, plain)


def test_without_images_a_model_with_a_part_for_them_is_its_text_model(tmp_path):
    save("gemma3", tmp_path)
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(whole(ids).logits, eager(tmp_path)(ids).logits)
