"""`model.tokenizer`: another tokenizer than the model's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rhymeflow import UserError, recipes
from rhymeflow.config import ModelConfig
from rhymeflow.models.tokenizer import load_tokenizer


def test_the_tokenizer_is_the_one_that_is_named(tmp_path: Path) -> None:
    own = AutoTokenizer.from_pretrained(recipes.directory("demo"))
    own.chat_template = "{{ messages[0].content }}"
    own.save_pretrained(tmp_path)
    config = ModelConfig(name="recipe:demo", tokenizer=str(tmp_path))
    assert load_tokenizer(config).chat_template == own.chat_template
    assert load_tokenizer(ModelConfig(name="recipe:demo")).chat_template != own.chat_template
    with pytest.raises(UserError, match="nowhere"):
        load_tokenizer(ModelConfig(name="recipe:demo", tokenizer="./nowhere"))
