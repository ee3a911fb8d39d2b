"""From `DataConfig` to the prompts to train on and the prompts to hold out.

Holds true: the same configuration and seed give the same prompts; no row of a file is in both
parts; what does not fit is a `UserError`, and nothing is cut short in silence.
"""

from __future__ import annotations

from pathlib import Path

from rhymeflow.config import DataConfig
from rhymeflow.data.files import read_rows
from rhymeflow.data.generators import generate, is_generator
from rhymeflow.data.prompts import PromptSource, Row, checked
from rhymeflow.errors import UserError

GENERATED_COLUMN = "prompt"
"""`data.prompt_column` is about files; generators call it this."""


def load_prompts(config: DataConfig, seed: int) -> tuple[PromptSource, PromptSource]:
    """Return (training prompts, held-out prompts); the second is empty if `eval_size` is 0.

    Raises:
        UserError: the source, its rows or the numbers are wrong.
    """
    _check_options(config)
    num_inner = config.eval_size if config.eval_source in (None, config.source) else 0
    if is_generator(config.source):
        if config.size is None:
            raise UserError(f"data.size: {config.source} makes problems; say how many")
        train, held_out = generate(
            config.source, config.options, seed, config.size, num_inner, "data.source"
        )
    elif config.eval_source == config.source and config.eval_size:
        raise UserError(
            f"data.eval_source: {config.source} is trained on; leave eval_source out to hold out "
            "its last rows"
        )
    else:
        train, held_out = _split(config, num_inner)
    if num_inner < config.eval_size:
        held_out = _held_out(config, seed)
    column, eval_column = (
        GENERATED_COLUMN if is_generator(source) else config.prompt_column
        for source in (config.source, config.eval_source or config.source)
    )
    return checked(train, column), checked(held_out, eval_column)


def _check_options(config: DataConfig) -> None:
    sources = [config.source] + ([config.eval_source] if config.eval_source else [])
    if config.options and not any(is_generator(source) for source in sources):
        raise UserError(
            f"data.options: {', '.join(config.options)} given, but {config.source} is read, not "
            "generated"
        )


def _split(config: DataConfig, num_held_out: int) -> tuple[list[Row], list[Row]]:
    rows = read_rows(Path(config.source), "data.source")
    remaining = len(rows) - num_held_out
    if remaining <= 0:
        raise UserError(
            f"data.eval_size = {num_held_out} leaves nothing to train on: {config.source} has "
            f"{len(rows)} rows"
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
        return generate(source, config.options, seed, 0, config.eval_size, field)[1]
    rows = read_rows(Path(source), field)
    if len(rows) < config.eval_size:
        raise UserError(f"data.eval_size = {config.eval_size}, but {source} has {len(rows)} rows")
    return rows[: config.eval_size]
