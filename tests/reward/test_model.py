"""The built-in `reward_model`: the first logit for prompt and response together."""

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from rhymeflow import UserError, recipes
from rhymeflow.config import RewardFunction
from rhymeflow.reward.functions import Judge
from tests.reward import judged


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge")
    tokenizer = AutoTokenizer.from_pretrained(recipes.directory("demo"))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_what_the_policy_was_given_is_scored_as_the_reward_models_template_writes_it(
    folder, tmp_path
):
    """Text that was made a message, a conversation with answers of its environment, and text."""
    copytree(folder, tmp_path, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    model = LlamaForSequenceClassification.from_pretrained(folder)

    def score(where: Path, seen: Any, turns: list[list[str]]) -> float | None:
        texts, parts = ["".join(turns[0])], turns if len(turns[0]) > 1 else []
        own = {"prompt": "a1?", "turns": parts, "seen": seen, "model": str(where)}
        return judged("reward_model", texts, {"seen": 1}, **own)[0]

    def expected(text: str) -> Any:
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        with torch.inference_mode():
            return pytest.approx(float(model(input_ids=ids).logits[0, 0]), abs=1e-5)

    system = {"role": "system", "content": "be"}
    seen = [system, {"role": "user", "content": "a1?"}]
    said = "<system>be<user>a1?"
    assert score(tmp_path, seen, [["2"]]) == expected(f"{said}<assistant>2")
    begun = [*seen, {"role": "assistant", "content": "so "}]
    assert score(tmp_path, begun, [["2"]]) == expected(f"{said}<assistant>so 2")
    turns = [["call", "3", "b2"]]
    assert score(tmp_path, seen, turns) == expected(f"{said}<assistant>call<tool>3<assistant>b2")
    assert score(tmp_path, "a1?so ", [["2"]]) == expected("a1?so 2")
    assert score(tmp_path, "a1?", turns) == expected("a1?call3b2")
    assert score(folder, seen, [["2"]]) == expected("a1?2")  # it has no template
    assert score(tmp_path, None, [["2"]]) == expected("a1?2")
    together = judged("reward_model", ["2", "a1=1 b2"], prompt="a1?", model=str(folder))
    assert together == [expected("a1?2"), expected("a1?a1=1 b2")]


def test_a_model_without_the_output_of_rewards_is_refused(folder, tmp_path):
    """Where it is missing transformers draws it, and rewards would be random."""
    copytree(folder, tmp_path, dirs_exist_ok=True)
    config = LlamaConfig.from_pretrained(folder)
    for model in (LlamaForCausalLM(config), LlamaForSequenceClassification(config)):
        if hasattr(model, "score"):
            model.score = torch.nn.Linear(8, 2, bias=False)
        model.save_pretrained(tmp_path)
        with pytest.raises(UserError, match="weight' is missing, or not for one number"):
            Judge(RewardFunction(function="reward_model", options={"model": str(tmp_path)}))


def test_what_is_no_model_is_said(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is no reward model that can be loaded"):
        Judge(RewardFunction(function="reward_model", options={"model": str(tmp_path)}))
    with pytest.raises(UserError, match="needs the option 'model'"):
        Judge(RewardFunction(function="reward_model"))
