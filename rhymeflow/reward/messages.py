"""What passes between the executor and its workers: typed, msgpack, no pickle.

Holds true: work is only sent to a worker that waits for it, so the parent never waits for user
code; every text in a reply is cut to `LONGEST_TEXT`.
"""

from __future__ import annotations

from typing import Any

import msgspec

LONGEST_TEXT = 1000
"""Characters of an error that are passed on."""


class TrainerState(msgspec.Struct, frozen=True):
    """How far training is: what TRL's `trainer_state` says of it."""

    global_step: int
    """Versions published when the responses were handed in."""
    max_steps: int


class RewardRequest(msgspec.Struct, frozen=True):
    """Responses to one prompt, judged together; `columns` are those of the prompt."""

    prompt: str | list[dict[str, Any]]
    completions: list[str]
    completion_ids: list[list[int]]
    columns: dict[str, Any]
    trainer_state: TrainerState
    turns: list[list[str]] = []
    """Where there are environments, of each: what the policy and its environment said, by turns."""
    seen: str | list[dict[str, Any]] | None = None
    """For reward models: the prompt as the policy was given it, text or messages, with what
    `data.assistant_prefix` begins the answer by."""


class Task(msgspec.Struct, frozen=True):
    """Call these functions (by index, in this order) on a request (an encoded `RewardRequest`)."""

    request: msgspec.Raw
    functions: list[int]


class Work(msgspec.Struct, frozen=True):
    """Tasks to do one after the other; every call of a function is answered by itself."""

    tasks: list[Task]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """All functions are imported."""


class Unusable(msgspec.Struct, frozen=True, tag=True):
    """A function cannot be had; the worker ends."""

    error: str


class Value(msgspec.Struct, frozen=True, tag=True):
    """The function's reward of each response, or None where it does not apply."""

    values: list[float | None]
    seconds: float
    noted: list[tuple[str, float]] = []
    """What it logged (`reward/logged.py`)."""
    extra: dict[str, list[Any]] = {}


class Failure(msgspec.Struct, frozen=True, tag=True):
    """The function gave no reward: `error` says what it did instead."""

    error: str
    seconds: float


Reply = Ready | Unusable | Value | Failure

encode = msgspec.msgpack.Encoder().encode
decode_work = msgspec.msgpack.Decoder(Work).decode
decode_request = msgspec.msgpack.Decoder(RewardRequest).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def clipped(text: str) -> str:
    """Return the text short enough, and encodable, for a reply."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 3] + "..."
