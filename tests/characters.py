"""Tiny models that read a character at a time: the tokenizer and the Llama of the recipes."""

from __future__ import annotations

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


def make_config(tokenizer: PreTrainedTokenizerFast, max_length: int) -> LlamaConfig:
    """4 layers, hidden 128, 4 heads of 32 with 2 key-value heads: 0.8 million parameters."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.08,  # about 1 / sqrt(128); the usual 0.02 learns three times slower
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
