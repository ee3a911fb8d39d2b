"""Special tokens that rewards do not see: those that stand for text."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree

import pytest
from tokenizers import AddedToken

from rhymeflow import cli, recipes
from rhymeflow.config import ModelConfig
from rhymeflow.models.tokenizer import load_tokenizer, unseen_tokens


def said(tmp_path: Path, *special: str, template: str | None = None) -> str | None:
    copytree(recipes.directory("demo"), tmp_path / "demo", dirs_exist_ok=True)
    config = ModelConfig(name=str(tmp_path / "demo"))
    tokenizer = load_tokenizer(config)
    tokenizer.add_tokens([AddedToken(each, special=True) for each in special])
    tokenizer.add_tokens(["<plain>"])
    tokenizer.chat_template = template
    return unseen_tokens(config, tokenizer)


@pytest.mark.parametrize("special", [(), ("<|im_start|>", "<s>", "<unused7>", "<｜fim▁hole｜>")])
def test_control_tokens_are_no_text(tmp_path: Path, special: tuple[str, ...]) -> None:
    assert said(tmp_path, *special) is None


def test_tags_are_named(tmp_path: Path) -> None:
    tags = [f"<{name}>" for name in "abcdef"]
    assert "has <a>, <b>, <c>, <d> and 2 more as special tokens" in said(tmp_path, *tags)
    assert "has <a> as special tokens" in said(tmp_path, "<a>", "<turn>", template="<turn>{{ 1 }}")


def test_a_dry_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copytree(recipes.directory("demo"), tmp_path / "tok")
    tokenizer = load_tokenizer(ModelConfig(name=str(tmp_path / "tok")))
    tokenizer.add_tokens([AddedToken("<answer>", special=True)])
    tokenizer.save_pretrained(tmp_path / "tok")
    more = ["--model.tokenizer", str(tmp_path / "tok")]
    assert cli.main(["train", "demo", "--dry-run", *more]) == 0
    assert "# the tokenizer has <answer> as special tokens" in capsys.readouterr().out
