"""What passes between the executor and its workers: typed, msgpack, no pickle.

Holds true: work is only sent to a worker that waits for it, so the parent never waits for user
code; every text in a reply is cut to `LONGEST_TEXT`.
"""

from __future__ import annotations

from typing import Any

import msgspec

LONGEST_TEXT = 1000
"""Characters of an error that are passed on."""


class RewardRequest(msgspec.Struct, frozen=True):
    """One trajectory to judge; `columns` are those of its prompt."""

    prompt: str | list[dict[str, Any]]
    completion: str
    completion_ids: list[int]
    columns: dict[str, Any]


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
    """The function's reward, or None if it does not apply to the sample."""

    value: float | None
    seconds: float


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
