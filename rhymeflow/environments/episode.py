"""An episode, as it is told to who has the environments, and what a turn took; loads no pool."""

from __future__ import annotations

from typing import Any

import msgspec


class Episode(msgspec.Struct, frozen=True, array_like=True):
    """All that an environment is brought to where it is by: its prompt, and what was said so far.

    `turns[i]` are the tokens that the policy sampled in turn i + 1, and `observed[i]` those that
    the environment answered to it; the last turn it may not have answered.
    """

    key: str
    """Names it in answers and in errors that users see."""
    row: int
    epoch: int
    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]
    turns: list[list[int]]
    observed: list[list[int]]
    opening: str = ""
    """What it said when it was opened; not part of `prompt`."""
    suite: str = ""
    """Of an answer to a suite's prompt, its name."""


class TurnFigures(msgspec.Struct, frozen=True, array_like=True):
    """What answering a turn took."""

    seconds: float = 0.0
    calls: int = 0
    """Of tools."""
    failed_calls: int = 0
    """Of tools: that could not be read, named no tool, or raised."""
