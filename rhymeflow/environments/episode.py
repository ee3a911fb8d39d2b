"""An episode as the environment worker gets it, and what a turn took; loads no pool."""

from __future__ import annotations

from typing import Any

import msgspec


class Episode(msgspec.Struct, frozen=True, array_like=True):
    """All that is needed to bring an environment to its present turn.

    `turns[i]` are the tokens that the policy sampled in turn i + 1, `observed[i]` those of the
    environment's answer, which the last turn may not have.
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
    """Text that `reset` returned; not part of `prompt`."""
    suite: str = ""
    """The suite whose prompt it is; empty: the run's."""


class TurnFigures(msgspec.Struct, frozen=True, array_like=True):
    """What answering a turn took."""

    seconds: float = 0.0
    calls: int = 0
    """Of tools."""
    failed_calls: int = 0
    """Of tools: that could not be read, named no tool, or raised."""
