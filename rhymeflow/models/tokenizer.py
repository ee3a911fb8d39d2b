"""Tokenizers, from where the configuration says.

Apart from `load` because what only encodes and decodes starts two seconds sooner without it.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from rhymeflow.config import ModelConfig
from rhymeflow.errors import UserError
from rhymeflow.models.reading import explained, offline, readable


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer with its chat template, if it has one; a missing pad token becomes eos."""
    source = readable(config)
    with explained(source, "the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source.location, **offline(source))
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def max_length(config: ModelConfig) -> int:
    """The model's context: tokens of the longest prompt and its response together.

    Raises `UserError` if there is no such model, or it does not say.
    """
    source = readable(config)
    with explained(source):
        hf_config = AutoConfig.from_pretrained(source.location, **offline(source))
    length: int | None = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    if length is None:
        raise UserError(
            f"model.name = {source.name!r}: its config.json names no max_position_embeddings"
        )
    return length
