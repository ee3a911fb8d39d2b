"""What a mirror consists of, as bytes with a checksum.

Object stores have no append, and a copy may be cut short anywhere: each object is written once and
says by itself whether it is whole.

Holds true: `unpack(pack(value), type)` gives the value back, and bytes that `pack` did not make, or
that changed since, are refused.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import xxhash

FORMAT = 1
_MAGIC = b"RHYMEFLOW-MIRROR-1\n"
_DIGEST = 16

T = TypeVar("T")


class Damaged(ValueError):  # noqa: N818 - it is what it is
    """An object is cut short, changed, or none of ours."""


class Position(msgspec.Struct, frozen=True):
    """Up to where the tables that only grow are copied: the last row of each."""

    events: int = 0
    commands: int = 0
    segments: int = 0
    changes: int = 0


class Tree(msgspec.Struct, frozen=True):
    """A directory that is copied: where it is in the mirror, and size and digest of each file."""

    place: str
    files: dict[str, tuple[int, str]]


class LogObject(msgspec.Struct):
    """What came into the store between two positions, without what grows with its tokens."""

    number: int
    """From 1 in each lineage."""
    is_whole: bool
    """Whether the store was at this state: a run can be resumed from here."""
    position: Position
    """Where it ends."""
    published: int
    """The version that was published last."""
    pruned_before: int
    """Tokens of groups that ended under a lesser version may be gone."""
    rows: dict[str, list[tuple[Any, ...]]]
    """By table, put in place of rows of the same key."""
    gone: list[tuple[str, int, int]]
    """Rows that are not there any more, by table and key."""
    tokens: str | None
    """The digest of the object of tokens beside it, if it has one."""
    trees: dict[str, Tree]
    """Directories that were complete in the mirror by then, by their path in the run directory."""
    snapshots: dict[int, str]
    """States of the coordinator in the mirror: where, by the last event they were told of."""
    digests: str | None = None
    """What the run's rows are (`meta`)."""


class TokensObject(msgspec.Struct):
    """What grows with tokens, of one `LogObject`."""

    segments: list[tuple[int, bytes, bytes, bytes | None]]
    """Row number, tokens, log-probabilities, and which were accepted."""
    texts: list[tuple[int, int, str]]
    """Of responses, by group and member."""
    details: list[tuple[int, int, bytes | None, bytes]]
    """Rows of `token_details`."""


class Beginning(msgspec.Struct, frozen=True):
    """A lineage: what one attempt at a run copied, and what it goes on from."""

    run: str
    """Which run it is of."""
    schema: int
    attempt: int
    previous: tuple[str, int] | None
    """The lineage that it follows, up to the object of this number; None: it has everything."""
    over: tuple[str, ...]
    """Lineages that were there when it began: whoever may still write to them is ignored."""
    format: int = FORMAT


def digest(data: bytes) -> str:
    """32 hexadecimal digits that say whether bytes are the same."""
    return xxhash.xxh3_128_hexdigest(data)


def pack(value: Any) -> bytes:
    """The value as bytes."""
    payload = msgspec.msgpack.encode(value)
    return _MAGIC + xxhash.xxh3_128_digest(payload) + payload


def unpack(data: bytes, kind: type[T]) -> T:
    """What `pack` was given. Raises `Damaged`."""
    start = len(_MAGIC) + _DIGEST
    payload = data[start:]
    if not data.startswith(_MAGIC) or xxhash.xxh3_128_digest(payload) != data[len(_MAGIC) : start]:
        raise Damaged("is cut short or changed")
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.DecodeError as error:
        raise Damaged(f"is of another format: {error}") from None
