"""What passes between the executor and its processes: typed, msgpack, no pickle.

`id` names one environment object in one process, and is used once. Arguments of tools are JSON
text, which keeps numbers of any size.

Holds true: an environment is asked one thing at a time; every question but `Close` is answered by
`Begun` and then one of `Opened`, `Answered`, `Rewarded` and `Failure`, if it is lived through and
not closed; every text of an error is cut.
"""

from __future__ import annotations

from typing import Any

import msgspec

LONGEST_TEXT = 1000
"""Characters of an error that are passed on."""

GRACE_SECONDS = 2.0
"""For a process to say what became of a call that it was told to cancel."""

Answer = list[dict[str, Any]] | str | None
"""What `Environment.step` returns."""


class Call(msgspec.Struct, frozen=True):
    """A call of a tool, as the policy wrote it; `error` says why it cannot be read, if so."""

    name: str
    arguments: str = "{}"
    """JSON of an object."""
    is_text: bool = False
    """Whether all arguments are text, of which the tool's schema says what is meant."""
    error: str = ""


class Said(msgspec.Struct, frozen=True):
    """A turn of the policy: its text, and the calls of tools in it."""

    text: str
    calls: list[Call]


class Opening(msgspec.Struct, frozen=True):
    """What an environment begins with; `kind` is its index in `kinds.load_kinds`."""

    kind: int
    seed: int
    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]
    text: str = ""
    """What it opened with before."""


class Open(msgspec.Struct, frozen=True, tag=True):
    """Make an environment and reset it."""

    id: int
    opening: Opening


class Step(msgspec.Struct, frozen=True, tag=True):
    """Answer this turn."""

    id: int
    said: Said


class Judge(msgspec.Struct, frozen=True, tag=True):
    """Give the reward."""

    id: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop the call in progress, which takes too long."""

    id: int


class Close(msgspec.Struct, frozen=True, tag=True):
    """Nothing more is asked; not answered."""

    id: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """All classes and tools are imported."""


class Unusable(msgspec.Struct, frozen=True, tag=True):
    """One cannot be had; the process ends."""

    error: str


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The next thing that is run is user code of this call."""

    id: int


class Opened(msgspec.Struct, frozen=True, tag=True):
    """It is reset, and opens with this text."""

    id: int
    text: str


class Answered(msgspec.Struct, frozen=True, tag=True):
    """What it answered to the turn."""

    id: int
    answer: Answer
    seconds: float
    calls: int
    """Of tools."""
    failed_calls: int


class Rewarded(msgspec.Struct, frozen=True, tag=True):
    """The reward, or None where it has none."""

    id: int
    value: float | None


class Failure(msgspec.Struct, frozen=True, tag=True):
    """The call came to nothing: `error` says what it did."""

    id: int
    error: str


class Stuck(msgspec.Struct, frozen=True, tag=True):
    """The call cannot be cancelled, or does not let itself be; all else goes on."""

    id: int


Question = Open | Step | Judge | Cancel | Close
Reply = Ready | Unusable | Begun | Opened | Answered | Rewarded | Failure | Stuck

encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(Question).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def encodable(text: str) -> str:
    """Return the text with halves of surrogate pairs written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def clipped(text: str) -> str:
    """Return the text short enough, and encodable, for an error."""
    text = encodable(text)
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 3] + "..."
