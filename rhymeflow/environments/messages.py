"""Messages between a pool and the processes that run environments.

`id` names one environment object in one process, which gets one request at a time. The reply to
every request except `Close` is `Begun`, followed by a `Reply`, `Failure` or `Late`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from rhymeflow.environments.episode import TurnFigures, Until
from rhymeflow.pool import Close, PoolMessage

Answer = list[dict[str, Any]] | str | None
"""Result of `Environment.step`."""


class Call(msgspec.Struct, frozen=True):
    """A tool call that the policy wrote; `error` says why it could not be parsed."""

    name: str
    arguments: str = "{}"
    """A JSON object as text, which keeps numbers of any size."""
    is_text: bool = False
    """Whether all arguments are text that the tool's schema converts."""
    error: str = ""


class Said(msgspec.Struct, frozen=True):
    """A turn of the policy: its text, and its tool calls."""

    text: str
    calls: list[Call]


class Opening(msgspec.Struct, frozen=True):
    """Arguments of a new environment; `kind` is an index into the kinds of all sections."""

    kind: int
    seed: int
    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]


class Open(PoolMessage):
    """Create an environment and reset it."""

    opening: Opening


class Step(PoolMessage):
    """Answer this turn."""

    said: Said


class GiveReward(PoolMessage):
    """Return the reward."""


class Opened(PoolMessage):
    """The environment is reset; `text` is what `reset` returned."""

    text: str


class Answered(PoolMessage):
    """The environment's answer to a turn."""

    answer: Answer
    figures: TurnFigures


class Rewarded(PoolMessage):
    """The reward, or None if the environment gives none."""

    value: float | None


class Called(NamedTuple):
    """A call of an agent's program; see `workers.messages.CallMade`."""

    number: int
    tokens: list[int]
    follows: int
    until: Until
    figures: TurnFigures
    is_streamed: bool


class Left(NamedTuple):
    """Nobody waits for the answer to a call any more."""

    number: int


Question = Open | Step | GiveReward | Close
Reply = Opened | Answered | Rewarded
