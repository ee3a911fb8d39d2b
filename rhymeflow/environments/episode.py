"""An episode as the environment worker gets it, and statistics of a turn; imports no pool."""

from __future__ import annotations

from typing import Any

import msgspec


class Episode(msgspec.Struct, frozen=True, array_like=True):
    """Everything that brings a new environment to the present turn. `turns[i]` are the tokens that
    the policy sampled in turn i + 1, `observed[i]` those of the environment's answer, which may be
    missing for the last turn."""

    key: str  # name of the episode in replies and in errors that users see
    row: int
    epoch: int
    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]
    turns: list[list[int]]
    observed: list[list[int]]
    opening: str = ""  # text that `reset` returned; not part of `prompt`
    suite: str = ""  # the suite of the prompt; "" for training prompts


class Until(msgspec.Struct, frozen=True, array_like=True):
    """What ends a turn of the policy beside the model's own stop tokens."""

    max_tokens: int | None = None
    """Most tokens of the turn; None: as many as the response may have."""
    texts: tuple[str, ...] = ()
    """The turn ends with the token by which its text has one of these in it."""
    tokens: frozenset[int] = frozenset()


class TurnFigures(msgspec.Struct, frozen=True, array_like=True):
    """Statistics of answering a turn."""

    seconds: float = 0.0
    calls: int = 0  # number of tool calls
    failed_calls: int = 0  # tool calls that could not be parsed, named no tool, or raised
