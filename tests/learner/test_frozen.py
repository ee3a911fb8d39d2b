"""Frozen parameters stay as they are; all others learn what they learn otherwise."""

from __future__ import annotations

import pytest
import torch

from rhymeflow import Trainer
from rhymeflow.config import Config
from rhymeflow.errors import UserError
from rhymeflow.runtime.resume_options import check_change
from tests.learner import rank_jobs
from tests.learner.builders import close, gradients, made_up_batch, tiny_learner, tiny_model
from tests.learner.rank_pool import on_ranks

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
    begun = {name: each.clone() for name, each in learner.weights().items()}
    expected, _ = gradients(a_learner(), batch)
    found, _ = gradients(learner, batch)
    assert found
    assert found.keys() < expected.keys()
    close(found, {name: expected[name] for name in found}, 1e-6)
    learner.train(batch, 0)
    changed = {n for n, each in learner.weights().items() if not torch.equal(each, begun[n])}
    assert changed
    assert changed <= found.keys()
    assert len(learner._optimizer._adamw.state) == len(found)


def test_a_checkpoint_continues_with_what_was_frozen(tmp_path):
    frozen = {"frozen_parameters": WHAT["below"], "gradient_checkpointing": True}
    learner, other = (tiny_learner(**frozen) for _ in "12")
    learner.train(made_up_batch(), 0)
    learner.save(tmp_path / "step-1")
    other.restore(tmp_path / "step-1")
    for each in (learner, other):
        each.train(made_up_batch(seed=1), 1)
    for name, weight in learner.weights().items():
        assert torch.equal(weight, other.weights()[name]), name


def test_ranks_freeze_the_same_and_save_and_restore_it(tmp_path):
    options = {"frozen_parameters": WHAT["below"], "kind": "qwen2", "tied": False}
    (_, weights), _ = on_ranks(2, rank_jobs.train, 2, options)
    learner = tiny_learner(model=tiny_model("qwen2", tied=False), frozen_parameters=WHAT["below"])
    begun = {name: each.clone() for name, each in learner.weights().items()}
    for step in range(2):
        learner.train(made_up_batch(seed=step), step)
    for name, weight in learner.weights().items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-5)
        is_frozen = name == WHAT["below"][0] or "layers.0." in name
        assert torch.equal(weights[name], begun[name]) == is_frozen, name
    (_, found), _ = on_ranks(2, rank_jobs.save_and_go_on, tmp_path / "step-1", 1, options)
    (_, again), _ = on_ranks(2, rank_jobs.restore_and_go_on, tmp_path / "step-1", 1, options)
    alone = tiny_learner(model=tiny_model("qwen2", tied=False), frozen_parameters=WHAT["below"])
    alone.restore(tmp_path / "step-1")
    alone.train(made_up_batch(seed=1), 1)
    for name, weight in found.items():
        assert torch.equal(again[name], weight), name
        torch.testing.assert_close(alone.weights()[name], weight, rtol=0, atol=1e-5)


def test_tied_weights_are_frozen_by_either_name():
    learner = tiny_learner(frozen_parameters=["lm_head.weight"])
    assert not learner.model.model.embed_tokens.weight.requires_grad


def test_a_name_of_nothing_and_all_names_are_refused():
    with pytest.raises(UserError, match=r"'model\.nothing' matches no parameter"):
        tiny_learner(frozen_parameters=["model.nothing"])
    with pytest.raises(UserError, match="every parameter is frozen"):
        tiny_learner(frozen_parameters=["*"])


def score(completions, **columns) -> list[float]:
    return [0.0 for _ in completions]


def test_a_model_object_says_what_is_frozen(tmp_path):
    model = tiny_model()
    model.model.embed_tokens.weight.requires_grad = False

    def a_trainer(**config):
        config = {"run.output_dir": str(tmp_path / "run"), **config}
        rows = [{"prompt": "1"}]
        return Trainer(model, score, rows, config=config, processing_class=NoTokenizer())

    frozen = a_trainer(frozen_parameters=["*norm*"]).config.learner.frozen_parameters
    assert frozen == ("*norm*", "model.embed_tokens.weight")


class NoTokenizer:
    def save_pretrained(self, directory) -> None:
        pass


def test_what_is_frozen_stays_so_when_a_run_is_resumed():
    config = Config()
    learner = config.learner.model_copy(update={"frozen_parameters": ("lm_head.weight",)})
    with pytest.raises(UserError, match=r"learner\.frozen_parameters: cannot be changed"):
        check_change(config, config.model_copy(update={"learner": learner}), 0)
