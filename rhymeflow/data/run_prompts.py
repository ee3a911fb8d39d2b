"""What a run trains on: its prompts, their order, and how they become tokens; what it holds out.

The same configuration, seed and tokenizer give the same prompts in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import xxhash

from rhymeflow.config import Config
from rhymeflow.data.encode import PromptEncoder, Tokenizer, Tools
from rhymeflow.data.load import load_prompts
from rhymeflow.data.prompts import PromptSource
from rhymeflow.data.stream import MixedStream, PromptStream
from rhymeflow.errors import UserError

LOOKED_AT = 10_000
"""Prompts whose length is looked at before a run begins: about a second. Others in their turn."""


class RunPrompts(NamedTuple):
    """The prompts of a run."""

    train: PromptSource
    stream: PromptStream | MixedStream
    """`train` in the order in which prompts are requested."""
    encoder: PromptEncoder
    held_out: PromptSource

    @classmethod
    def none(cls) -> RunPrompts:
        """Of a run that trains on nothing: nobody asks for a prompt."""
        return cls([], None, None, [])  # type: ignore[arg-type]

    @classmethod
    def load(
        cls, config: Config, tokenizer: Tokenizer, max_length: int, tools: Tools = None
    ) -> RunPrompts:
        """Read and encode what the configuration names; `max_length` is the model's context, and
        `tools` what the chat template is told of them.

        Raises:
            UserError: the data cannot be read, or does not fit the configuration or the model.
        """
        room = max_length - config.rollout.max_completion_length
        if room <= 0:
            raise UserError(
                f"rollout.max_completion_length = {config.rollout.max_completion_length} leaves "
                f"no room for a prompt in the model's context of {max_length} tokens"
            )
        encoder = PromptEncoder(tokenizer, config.data, room, tools)
        train, held_out = load_prompts(config.data, config.run.seed)
        stream = _stream(train, config)
        for row in range(min(len(train), LOOKED_AT)):
            encoder.encode(train[row])
        return cls(train, stream, encoder, held_out)


def _stream(train: PromptSource, config: Config) -> PromptStream | MixedStream:
    """The order of prompts, of one kind or of several that have shares."""
    classes, seed, shuffle = config.environment.classes, config.run.seed, config.data.shuffle
    shares = [each.share for each in classes if each.share is not None]
    if len(shares) < 2:
        return PromptStream(train, seed, shuffle)
    kinds: dict[str, list[int]] = {each.reward_name: [] for each in classes}
    for row in range(len(train)):
        kind = train[row].columns.get("environment")
        if kind not in kinds:
            raise UserError(
                f"{train[row].where}: column 'environment' is {kind!r}, should name one of "
                f"{', '.join(kinds)}"
            )
        kinds[kind].append(row)
    for name, rows in kinds.items():
        if not rows:
            raise UserError(f"environment.classes: {name} has a share, and no row of the data")
    return MixedStream(train, kinds.values(), shares, seed, shuffle)


def digest(prompts: PromptSource) -> str:
    """How many rows, and 32 hexadecimal digits of what they are."""
    encode = msgspec.msgpack.Encoder(order="deterministic").encode
    content = xxhash.xxh3_128()
    for row in range(len(prompts)):
        content.update(encode((prompts[row].prompt, prompts[row].columns)))
    return f"{len(prompts)} {content.hexdigest()}"


def check_same(what: str, source: str, before: str, now: str) -> None:
    """Look whether rows of `source` are as they were, by their digests; `what` they are.

    Raises:
        UserError: they are not.
    """
    if now == before:
        return
    was, are = (each.partition(" ")[0] for each in (before, now))
    count = f"{are} rows instead of {was}" if was != are else f"other content in its {was} rows"
    raise UserError(
        f"{what}: {source} has {count} since the run began, which goes on by their numbers: "
        "put back what was there, or begin a new run with a checkpoint of this one as --model.name"
    )
