"""Whether what stands in the tables of an event store is what its schema says.

SQLite checks its pages and not what is in them: a byte of a stored value that changed (a disk, a
memory, a copy) is found by nobody. This looks at each value by itself: its type, its text, its
JSON, its length. A number or a token that is another one now is not found.

Holds true: what a run writes passes. Reads all of the store; for one that gave an error.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from rhymeflow.store import codec

_INT32 = 4


class _Text(bytes):
    """What is stored as text, before it is known to be any."""


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "INTEGER": int,
    "REAL": (float, int),
    "TEXT": _Text,
    "BLOB": bytes,
}


def first_wrong(path: Path) -> str | None:
    """The first value that is not as it should be: where, and what is wrong; None: there is none.

    Raises:
        sqlite3.DatabaseError: the file cannot be read.
    """
    uri = f"file:{quote(str(path.resolve()))}?mode=ro"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None)
    connection.text_factory = _Text
    try:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        for table in sorted(name.decode() for (name,) in tables):
            wrong = _first_wrong_in(connection, table)
            if wrong is not None:
                return wrong
    finally:
        connection.close()
    return None


def _first_wrong_in(connection: sqlite3.Connection, table: str) -> str | None:
    columns = [
        (name.decode(), kind.decode(), bool(not_null or key))
        for _, name, kind, not_null, _, key in connection.execute(f"PRAGMA table_info({table})")
    ]
    check = _CHECKS.get(table, lambda row: None)
    for number, *values in connection.execute(f"SELECT rowid, * FROM {table}"):
        where = f"row {number} of {table}"
        for (name, kind, required), value in zip(columns, values, strict=True):
            if (value is None and not required) or not kind:
                continue
            if value is None or not isinstance(value, _TYPES[kind]):
                return f"{where}: {name} is no {kind}"
            if kind == "BLOB" and isinstance(value, _Text):
                return f"{where}: {name} is no {kind}"
        try:
            check(dict(zip((name for name, _, _ in columns), map(_read, values), strict=True)))
        except (ValueError, KeyError, msgspec.DecodeError) as error:
            return f"{where}: {' '.join(str(error).split())}"
    return None


def _read(value: Any) -> Any:
    return value.decode() if isinstance(value, _Text) else value


def _event(row: Mapping[str, Any]) -> None:
    codec.decode(row["kind"], row["body"])


def _command(row: Mapping[str, Any]) -> None:
    codec.decode_command(row["kind"], row["body"])


def _object(row: Mapping[str, Any], name: str) -> None:
    if row[name] is not None and not isinstance(json.loads(row[name]), dict):
        raise ValueError(f"{name} is no JSON object")


def _tokens(row: Mapping[str, Any], *names: str) -> None:
    sizes = {name: len(row[name]) for name in names if row[name] is not None}
    if any(size % _INT32 for size in sizes.values()) or len(set(sizes.values())) > 1:
        raise ValueError(f"{' and '.join(names)} have {sizes} bytes")


def _segment(row: Mapping[str, Any]) -> None:
    _tokens(row, "tokens", "logprobs")
    if row["accepted"] is not None and len(row["accepted"]) * _INT32 != len(row["tokens"]):
        raise ValueError("accepted has not a byte for each token")


def _group(row: Mapping[str, Any]) -> None:
    _object(row, "columns")
    _tokens(row, "prompt_tokens")


_CHECKS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    "attempts": lambda row: _object(row, "config"),
    "events": _event,
    "commands": _command,
    "groups": _group,
    "segments": _segment,
    "trajectories": lambda row: _object(row, "components"),
    "token_details": lambda row: _tokens(row, "logprobs"),
}
