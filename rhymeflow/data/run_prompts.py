"""What a run trains and is evaluated on: its prompts, their order, and how they become tokens.

Holds true: the same configuration, seed and tokenizer give the same prompts in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

from rhymeflow.config import Config
from rhymeflow.data.encode import PromptEncoder, Tokenizer
from rhymeflow.data.load import load_prompts
from rhymeflow.data.prompts import PromptSource
from rhymeflow.data.stream import PromptStream


class RunPrompts(NamedTuple):
    """The prompts of a run."""

    train: PromptSource
    stream: PromptStream
    """`train` in the order in which prompts are requested."""
    encoder: PromptEncoder
    held_out: PromptSource
    held_out_ids: list[list[int]]
    """Tokens of the held-out prompts, by row."""

    @classmethod
    def load(cls, config: Config, tokenizer: Tokenizer) -> RunPrompts:
        """Read and encode what the configuration names.

        Raises:
            UserError: the data cannot be read, or does not fit the configuration.
        """
        encoder = PromptEncoder(tokenizer, config.data)
        train, held_out = load_prompts(config.data, config.run.seed)
        stream = PromptStream(train, config.run.seed, config.data.shuffle)
        held_out_ids = [encoder.encode(held_out[row]) for row in range(len(held_out))]
        return cls(train, stream, encoder, held_out, held_out_ids)
