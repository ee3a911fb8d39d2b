"""Frozen parameters stay as they are; all others learn what they learn otherwise."""

import pytest
import torch

from rhymeflow import Trainer
from rhymeflow.config import Config
from rhymeflow.errors import UserError
from rhymeflow.runtime.resume_options import check_change
from tests.learner.builders import close, gradients, made_up_batch, tiny_learner, tiny_model

WHAT = {
    "below": ["model.embed_tokens.weight", "model.layers.0.*"],
    "the head": ["lm_head.weight"],
    "but the head": ["model.*"],
    "biases": ["*.bias", "*norm.weight"],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", WHAT)
def test_what_is_not_frozen_has_the_gradient_that_it_has_otherwise(what, dtype):
    def a_learner(**changes):
        return tiny_learner(
            model=tiny_model("qwen2", tied=False), dtype=dtype, weight_decay=0.1, **changes
        )

    learner, batch = a_learner(frozen_parameters=WHAT[what]), made_up_batch()
    begun = {name: each.clone() for name, each in learner.rows().items()}
    expected, _ = gradients(a_learner(), batch)
    found, _ = gradients(learner, batch)
    assert found
    assert found.keys() < expected.keys()
    close(found, {name: expected[name] for name in found}, 1e-6)
    learner.train(batch, 0)
    changed = {n for n, each in learner.rows().items() if not torch.equal(each, begun[n])}
    assert changed
    assert changed <= found.keys()
    assert len(learner._optimizer._adamw.state) == len(found)


def test_tied_weights_are_frozen_by_either_name():
    learner = tiny_learner(frozen_parameters=["lm_head.weight"])
    assert not learner.model.model.embed_tokens.weight.requires_grad


def test_a_name_of_nothing_and_all_names_are_refused():
    with pytest.raises(UserError, match=r"'model\.nothing' matches no parameter"):
        tiny_learner(frozen_parameters=["model.nothing"])
    with pytest.raises(UserError, match="every parameter is frozen"):
        tiny_learner(frozen_parameters=["*"])


def test_a_model_object_says_what_is_frozen(tmp_path):
    model = tiny_model()
    model.model.embed_tokens.weight.requires_grad = False
    config = {"run.output_dir": str(tmp_path / "run"), "frozen_parameters": ["*norm*"]}
    made = Trainer(model, config=config, processing_class=object())
    assert made.config.learner.frozen_parameters == ("*norm*", "model.embed_tokens.weight")


@pytest.mark.parametrize("given", [(), ("--lora", "2")])
def test_a_dry_run_finds_a_name_that_fits_nothing(given, refused):
    name = "model.embed_tokens.weight" if given else "nope"
    patterns = ("--learner.frozen_parameters", f"[{name}]")
    said = refused("train", "demo", "--dry-run", *given, *patterns)
    assert f"{name!r} matches no parameter that is trained" in said


def test_what_is_frozen_stays_so_when_a_run_is_resumed():
    config = Config()
    learner = config.learner.model_copy(update={"frozen_parameters": ("lm_head.weight",)})
    with pytest.raises(UserError, match=r"learner\.frozen_parameters: cannot be changed"):
        check_change(config, config.model_copy(update={"learner": learner}), 0)
