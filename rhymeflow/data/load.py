"""Loads a run's training prompts and held-out prompts, according to `DataConfig`.

The same configuration, seed and tokenizer give the same prompts in the same order; no row of a file
is in both parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from rhymeflow.config import Config, DataConfig
from rhymeflow.data.encode import PromptEncoder, Tokenizer, Tools
from rhymeflow.data.files import check_source, read_rows
from rhymeflow.data.generators import generate, is_generator
from rhymeflow.data.prompts import Prompt, Row, checked, kind_of
from rhymeflow.data.stream import MixedStream, PromptStream
from rhymeflow.errors import UserError, counted

NUM_CHECKED = 10_000
"""Prompts that are encoded, and so checked, before a run begins; that takes about a second."""

GENERATED_COLUMN = "prompt"
"""The prompt's column in a generator's rows; `data.prompt_column` is for files."""

MOST_GENERATED = 1_000_000
"""Most problems of a generator. All are generated before the run begins and stay in memory, since
the held-out ones must differ from all others: half a minute and 1 GB for the demo's task."""

EVAL_SIZE = 64
"""Default number of held-out prompts."""

ROWS_PER_HELD_OUT = 10
"""By default at most one in this many rows of a file is held out."""


class RunPrompts(NamedTuple):
    """The prompts of a run."""

    train: list[Prompt]
    stream: PromptStream | MixedStream
    """`train` in the order in which prompts are requested."""
    encoder: PromptEncoder
    held_out: list[Prompt]

    @classmethod
    def none(cls) -> RunPrompts:
        """Return no prompts, for a run that does not train."""
        return cls([], None, None, [])  # type: ignore[arg-type]

    @classmethod
    def load(
        cls, config: Config, tokenizer: Tokenizer, max_length: int, tools: Tools = None
    ) -> RunPrompts:
        """Read the data; the chat template describes `tools`. Raises `UserError` if the data
        cannot be read, or one of the first prompts does not fit into `max_length` tokens."""
        room = max_length - config.rollout.max_completion_length
        if room <= 0:
            raise UserError(
                f"rollout.max_completion_length = {config.rollout.max_completion_length} leaves "
                f"no room for a prompt in the model's context of {max_length} tokens"
            )
        encoder = PromptEncoder(tokenizer, config.data, room, tools)
        train, held_out = load_prompts(config.data, config.run.seed)
        for prompt in train[:NUM_CHECKED]:
            encoder.encode(prompt)
        return cls(train, _stream(train, config), encoder, held_out)


def _stream(train: list[Prompt], config: Config) -> PromptStream | MixedStream:
    classes, seed, shuffle = config.environment.classes, config.run.seed, config.data.shuffle
    shares = [each.share for each in classes if each.share is not None]
    if len(shares) < 2:
        return PromptStream(train, seed, shuffle)
    names = [each.reward_name for each in classes]
    kinds: list[list[Prompt]] = [[] for _ in names]
    for prompt in train:
        kinds[kind_of(names, prompt.columns, prompt.where)].append(prompt)
    for name, prompts in zip(names, kinds, strict=True):
        if not prompts:
            raise UserError(f"environment.classes: {name} has a share, and no row of the data")
    return MixedStream(kinds, shares, seed, shuffle)


def digest(prompts: Sequence[Prompt]) -> str:
    """Return the number of rows and a hash of their contents, 32 hexadecimal digits."""
    encode = msgspec.msgpack.Encoder(order="deterministic").encode
    content = xxhash.xxh3_128()
    for each in prompts:
        content.update(encode((each.prompt, each.columns)))
    return f"{len(prompts)} {content.hexdigest()}"


def check_same(what: str, source: str, before: str, now: str) -> None:
    """Raise `UserError` unless digests of the rows of `source` are equal."""
    if now == before:
        return
    was, are = (each.partition(" ")[0] for each in (before, now))
    count = f"{are} rows instead of {was}" if was != are else f"other content in its {was} rows"
    raise UserError(
        f"{what}: {source} has {count} since the run began. A run finds its prompts by row number: "
        "put back what was there, or begin a new run with a checkpoint of this one as --model.name"
    )


def check_same_template(config: DataConfig, template: Any, digests: dict[str, str]) -> None:
    """Raise `UserError` unless the chat template is that of `digests`; put it there if none is."""
    current = xxhash.xxh3_128(msgspec.json.encode(template)).hexdigest()
    if digests.setdefault("chat template", current) == current:
        return
    where = config.chat_template
    of = f"data.chat_template: {where}" if isinstance(where, str) else "the chat template"
    raise UserError(
        f"{of} has changed since the run began, and the policy would read other prompts: put back "
        "what was there, or begin a new run with a checkpoint of this one as --model.name"
    )


def load_prompts(config: DataConfig, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Return (training prompts, held-out prompts); the second is empty if `eval_size` is 0."""
    train, held_out = load_rows(config, seed)
    column, eval_column = (
        GENERATED_COLUMN if is_generator(source) else config.prompt_column
        for source in (config.source, config.eval_source or config.source)
    )
    return checked(train, column), checked(held_out, eval_column)


def load_rows(config: DataConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """Return the rows of `load_prompts` as they were read, unchecked."""
    _check_numbers(config)
    source, eval_source = config.source, config.eval_source
    has_eval_source = eval_source not in (None, source)
    if is_generator(source):
        assert config.size is not None
        num_held_out = 0 if has_eval_source else _eval_size(config)
        train, held_out = generate(
            source, config.options, seed, config.size, num_held_out, "data.source"
        )
    elif eval_source == source and config.eval_size != 0:
        raise UserError(
            f"data.eval_source: {source} is trained on; leave eval_source out to hold out its last "
            "rows"
        )
    else:
        train, held_out = _split(config, has_eval_source)
    if has_eval_source and config.eval_size != 0:
        held_out = _held_out(config, seed)
    return train, held_out


def check_sources(config: DataConfig) -> None:
    """Raise `UserError` unless files exist and are of a known kind, without reading them."""
    _check_numbers(config)
    for field, source in (("source", config.source), ("eval_source", config.eval_source)):
        if source is not None and not is_generator(source):
            check_source(Path(source), f"data.{field}")


def _check_numbers(config: DataConfig) -> None:
    """Raise `UserError` if a generator has no size or too large a one, or a file has options."""
    if config.options and not any(map(is_generator, (config.source, config.eval_source or ""))):
        raise UserError(
            f"data.options: {', '.join(config.options)} given, but {config.source} is a file; "
            "options are for reasoning_gym:NAME, recipe:NAME and verifiers:NAME"
        )
    if is_generator(config.source) and config.size is None:
        raise UserError(f"data.size: {config.source} makes problems; say how many")
    for field, source, size in (
        ("size", config.source, config.size),
        ("eval_size", config.eval_source or config.source, config.eval_size),
    ):
        if is_generator(source) and size is not None and size > MOST_GENERATED:
            raise UserError(
                f"data.{field} = {size:,}: {source} generates its problems before the run begins "
                f"and keeps them in memory, so at most {MOST_GENERATED:,}"
            )


def _eval_size(config: DataConfig, most: int | None = None) -> int:
    """Return `data.eval_size`, or by default `EVAL_SIZE`, at most `most`."""
    if config.eval_size is not None:
        return config.eval_size
    return EVAL_SIZE if most is None else min(EVAL_SIZE, most)


def _split(config: DataConfig, has_eval_source: bool) -> tuple[list[Row], list[Row]]:
    """Return a file's training rows, and its last rows to hold out (none with an `eval_source`)."""
    rows = read_rows(Path(config.source), "data.source")
    num_held_out = 0 if has_eval_source else _eval_size(config, -(-len(rows) // ROWS_PER_HELD_OUT))
    remaining = len(rows) - num_held_out
    if remaining <= 0:
        raise UserError(
            f"data.eval_size = {num_held_out} leaves nothing to train on: {config.source} has "
            f"{counted(len(rows), 'row')}; 0 holds out none"
        )
    if config.size is not None and config.size > remaining:
        held = f" less {num_held_out} held out" if num_held_out else ""
        raise UserError(
            f"data.size = {config.size}, but {config.source} has {len(rows)} rows{held}"
        )
    return rows[: config.size or remaining], rows[remaining:]


def _held_out(config: DataConfig, seed: int) -> list[Row]:
    source, field = config.eval_source, "data.eval_source"
    assert source is not None
    if is_generator(source):
        return generate(source, config.options, seed, 0, _eval_size(config), field)[1]
    rows = read_rows(Path(source), field)
    count = _eval_size(config, len(rows))
    if len(rows) < count:
        raise UserError(f"data.eval_size = {count}, but {source} has {len(rows)} rows")
    return rows[:count]
