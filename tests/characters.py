"""Tiny models that read a character at a time, as the recipes' do."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast


def make_tokenizer(alphabet: str, max_length: int) -> PreTrainedTokenizerFast:
    """One token a character; `<pad>` is 0, `<eos>` is 1."""
    vocabulary = {symbol: index for index, symbol in enumerate(["<pad>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def small_llama(vocab_size: int, max_length: int, **more: Any) -> LlamaConfig:
    """A Llama of width 32 with those two tokens."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=max_length,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        **more,
    )


def save_without_weights(
    directory: Path, alphabet: str, max_length: int, chat_template: str | None = None
) -> Path:
    """Save such a tokenizer and the configuration of a Llama with one layer."""
    tokenizer = make_tokenizer(alphabet, max_length)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    small_llama(
        len(tokenizer),
        max_length,
        architectures=["LlamaForCausalLM"],
        intermediate_size=48,
        num_hidden_layers=1,
        head_dim=16,
        tie_word_embeddings=True,
        initializer_range=0.08,
    ).save_pretrained(directory)
    return directory
