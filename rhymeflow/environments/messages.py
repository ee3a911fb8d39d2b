"""What passes between a pool and the processes that run environments.

`id` names one environment object in one process, which is asked one thing at a time. Every question
but `Close` is answered by `Begun` and then a `Reply`, `Failure` or `Late`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rhymeflow.environments.episode import TurnFigures
from rhymeflow.pool import Close, PoolMessage

Answer = list[dict[str, Any]] | str | None
"""What `Environment.step` returns."""


class Call(msgspec.Struct, frozen=True):
    """A call of a tool, as the policy wrote it; `error`: why it is unreadable, if so."""

    name: str
    arguments: str = "{}"
    """JSON of an object, which keeps numbers of any size."""
    is_text: bool = False
    """Whether all arguments are text, to be converted by the tool's schema."""
    error: str = ""


class Said(msgspec.Struct, frozen=True):
    """A turn of the policy: its text, and the calls of tools in it."""

    text: str
    calls: list[Call]


class Opening(msgspec.Struct, frozen=True):
    """What an environment is made of; `kind` is its index among those of all sections."""

    kind: int
    seed: int
    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]


class Open(PoolMessage):
    """Make an environment and reset it."""

    opening: Opening


class Step(PoolMessage):
    """Answer this turn."""

    said: Said


class GiveReward(PoolMessage):
    """Return the reward."""


class Opened(PoolMessage):
    """It is reset, and returned this text."""

    text: str


class Answered(PoolMessage):
    """Its answer to the turn."""

    answer: Answer
    figures: TurnFigures


class Rewarded(PoolMessage):
    """The reward, or None where it has none."""

    value: float | None


Question = Open | Step | GiveReward | Close
Reply = Opened | Answered | Rewarded
