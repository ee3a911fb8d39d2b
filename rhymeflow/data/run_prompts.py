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
from rhymeflow.errors import UserError

LOOKED_AT = 10_000
"""Prompts whose length is looked at before a run begins: about a second. Others in their turn."""


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
    def load(cls, config: Config, tokenizer: Tokenizer, max_length: int) -> RunPrompts:
        """Read and encode what the configuration names; `max_length` is the model's context.

        Raises:
            UserError: the data cannot be read, or does not fit the configuration or the model.
        """
        room = max_length - config.rollout.max_completion_length
        if room <= 0:
            raise UserError(
                f"rollout.max_completion_length = {config.rollout.max_completion_length} leaves "
                f"no room for a prompt in the model's context of {max_length} tokens"
            )
        encoder = PromptEncoder(tokenizer, config.data, room)
        train, held_out = load_prompts(config.data, config.run.seed)
        stream = PromptStream(train, config.run.seed, config.data.shuffle)
        held_out_ids = [encoder.encode(held_out[row]) for row in range(len(held_out))]
        for row in range(min(len(train), LOOKED_AT)):
            encoder.encode(train[row])
        return cls(train, stream, encoder, held_out, held_out_ids)
