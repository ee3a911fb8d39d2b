"""What is asked of an executor about an episode, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rhymeflow.environments.messages import Answer, Answered, Opening, Said


@dataclass(frozen=True, slots=True)
class Request:
    """What is wanted of an episode: the answer to the last of `turns`; if `judges`, the reward; if
    `opens`, what it opens with.

    `accepts(turn, answer)` looks at an answer to a turn (from 0) but the last that is asked for; it
    returns what is wrong with it, if anything is.
    """

    key: str
    opening: Opening
    turns: Sequence[Said]
    judges: bool
    accepts: Callable[[int, Answer], str | None]
    opens: bool = False


@dataclass(frozen=True, slots=True)
class EpisodeOpening:
    """What is to be put after the prompt."""

    key: str
    text: str


@dataclass(frozen=True, slots=True)
class EpisodeAnswer:
    """What the environment answered to the last turn."""

    key: str
    answered: Answered


@dataclass(frozen=True, slots=True)
class EpisodeReward:
    """The environment's reward, or None where it has none."""

    key: str
    value: float | None


@dataclass(frozen=True, slots=True)
class EpisodeError:
    """Neither could be had: `message` says what happened."""

    key: str
    message: str


Outcome = EpisodeOpening | EpisodeAnswer | EpisodeReward | EpisodeError
