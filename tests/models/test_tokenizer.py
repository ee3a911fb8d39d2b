"""Tokenizers: the one that is named, as `AutoTokenizer` finds it, without what models need; special
tokens that rewards do not see."""

import json
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import pytest
import transformers
from tokenizers import AddedToken
from transformers import AutoTokenizer

from rhymeflow import UserError, cli, recipes
from rhymeflow.config import Config, ModelConfig
from rhymeflow.models.tokenizer import load_tokenizer, unseen_tokens
from rhymeflow.workers.reward import decoder

CODE = """
import sys
from rhymeflow.config import ModelConfig
from rhymeflow.models.tokenizer import load_tokenizer
load_tokenizer(ModelConfig(name="recipe:demo"))
print(*{"transformers.modeling_utils", "torch._dynamo", "numba"} & set(sys.modules))
"""


def same(directory) -> bool:
    ours, theirs = (
        load_tokenizer(ModelConfig(name=directory)),
        AutoTokenizer.from_pretrained(directory),
    )
    texts = ("a3 b4?", " =12")
    return type(ours) is type(theirs) and all(ours.encode(t) == theirs.encode(t) for t in texts)


def test_it_is_what_auto_tokenizer_finds(tmp_path):
    demo = recipes.directory("demo")
    assert same(str(demo))
    unnamed = tmp_path / "unnamed"
    copytree(demo, unnamed)
    file = unnamed / "tokenizer_config.json"
    fields = json.loads(file.read_text())
    del fields["tokenizer_class"]
    file.write_text(json.dumps(fields))
    assert same(str(unnamed))
    published = tmp_path / "published"  # Llama 3's and others' scaled positions, as on the hub
    copytree(demo, published)
    file = published / "config.json"
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    fields = json.loads(file.read_text()) | {"rope_theta": 1e4, "rope_scaling": rope}
    del fields["rope_parameters"]
    file.write_text(json.dumps(fields))
    assert same(str(published))


def test_code_that_comes_with_a_tokenizer_is_not_run_and_nobody_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda question: "y")
    directory = tmp_path / "coded"
    copytree(recipes.directory("demo"), directory)
    fields = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))
    (directory / "own.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(UserError, match="contains custom code"):
        load_tokenizer(ModelConfig(name=str(directory)))


def test_it_loads_no_model_code():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    own = ["torch._dynamo"] if transformers.__version__.startswith("5.19.") else []
    assert done.stdout.split() == own


def test_the_tokenizer_is_the_one_that_is_named(tmp_path):
    own = AutoTokenizer.from_pretrained(recipes.directory("demo"))
    own.chat_template = "{{ messages[0].content }}"
    own.save_pretrained(tmp_path)
    config = ModelConfig(name="recipe:demo", tokenizer=str(tmp_path))
    assert load_tokenizer(config).chat_template == own.chat_template
    assert load_tokenizer(ModelConfig(name="recipe:demo")).chat_template != own.chat_template
    with pytest.raises(UserError, match="nowhere"):
        load_tokenizer(ModelConfig(name="recipe:demo", tokenizer="./nowhere"))


def said(tmp_path: Path, *special: str, template: str | None = None, **rollout: bool) -> str | None:
    copytree(recipes.directory("demo"), tmp_path / "demo", dirs_exist_ok=True)
    config = Config.model_validate({"model": {"name": str(tmp_path / "demo")}, "rollout": rollout})
    tokenizer = load_tokenizer(config.model)
    tokenizer.add_tokens([AddedToken(each, special=True) for each in special])
    tokenizer.add_tokens(["<plain>"])
    tokenizer.chat_template = template
    return unseen_tokens(config, tokenizer)


@pytest.mark.parametrize("special", [(), ("<|im_start|>", "<s>", "<unused7>", "<｜fim▁hole｜>")])
def test_control_tokens_are_no_text(tmp_path, special):
    assert said(tmp_path, *special) is None


def test_tags_are_named(tmp_path):
    tags = [f"<{name}>" for name in "abcdef"]
    assert "has <a>, <b>, <c>, <d> and 2 more as special tokens" in said(tmp_path, *tags)
    assert "has <a> as special tokens" in said(tmp_path, "<a>", "<turn>", template="<turn>{{ 1 }}")
    assert said(tmp_path, *tags, skip_special_tokens=False) is None


def test_rewards_get_the_text_of_special_tokens_if_asked_to():
    config = Config.model_validate({"model": {"name": "recipe:demo"}})
    tokenizer = load_tokenizer(config.model)
    tokenizer.add_tokens([AddedToken("<answer>", special=True)])
    ids = tokenizer("<answer>12", add_special_tokens=False)["input_ids"]
    assert decoder(tokenizer, config)(ids) == "12"
    kept = config.changed(rollout={"skip_special_tokens": False})
    assert decoder(tokenizer, kept)(ids) == "<answer>12"


def test_a_dry_run_says_so(tmp_path, capsys):
    copytree(recipes.directory("demo"), tmp_path / "tok")
    tokenizer = load_tokenizer(ModelConfig(name=str(tmp_path / "tok")))
    tokenizer.add_tokens([AddedToken("<answer>", special=True)])
    tokenizer.save_pretrained(tmp_path / "tok")
    more = ["--model.tokenizer", str(tmp_path / "tok")]
    assert cli.main(["train", "demo", "--dry-run", *more]) == 0
    assert "# the tokenizer has <answer> as special tokens" in capsys.readouterr().out
