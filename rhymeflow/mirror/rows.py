"""What is new in a store since a position, read in one transaction; and the same put into another.

Tables that only grow are read from their last row on; of the others `changes` names what was put,
changed or taken out, and it is copied as it is now. So what is copied depends on two states of the
store only, and not on what happened between them, and a copy can be taken up at any time.

Holds true: a store into which all parts were put, up to one that is whole, has the rows of the
store at that state, but for its file's `meta` and snapshots, and for tokens that were pruned.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rhymeflow.mirror.objects import LogObject, Position, TokensObject
from rhymeflow.store.schema import NOTED

ROWS_AT_ONCE = 50_000
BYTES_AT_ONCE = 64 * 2**20
"""Of one object; the rest comes with the next."""

_SEGMENTS = """SELECT rowid, group_id, member, start, version, instance, steps, drafted,
    tokens, logprobs, accepted FROM segments WHERE rowid > ? ORDER BY rowid"""
_PUBLISHED = """SELECT json_extract(body, '$.version') FROM events
    WHERE kind = 'VersionPublished' ORDER BY seq DESC LIMIT 1"""
_PRUNED_BEFORE = "SELECT value FROM meta WHERE key = 'pruned_before'"
_SNAPSHOT = "SELECT event, state FROM snapshots WHERE event > ? ORDER BY event DESC LIMIT 1"


class Part(NamedTuple):
    """What is new, as far as it goes into one object."""

    log: LogObject
    tokens: TokensObject
    snapshot: tuple[int, bytes] | None
    """The newest state of the coordinator, if it is newer."""
    last_event: tuple[int, float] | None
    """Number and time of the last event that is in the log now."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is new."""
        return not any(self.log.rows.values()) and not self.log.gone and self.snapshot is None


def read_part(connection: sqlite3.Connection, since: Position, snapshot: int) -> Part:
    """What is new after this position, and after the snapshot of this event."""
    connection.execute("BEGIN")
    try:
        return _Reading(connection, since).part(snapshot)
    finally:
        connection.execute("COMMIT")


class _Reading:
    """One state of a store."""

    def __init__(self, connection: sqlite3.Connection, since: Position) -> None:
        self._query: Callable[..., sqlite3.Cursor] = connection.execute
        self._since = since
        self._rows: dict[str, list[tuple[Any, ...]]] = {}
        self._gone: list[tuple[str, int, int]] = []
        self._tokens = TokensObject([], [], [])
        self._is_whole = True

    def part(self, snapshot: int) -> Part:
        position = Position(
            self._grown("events", self._since.events),
            self._grown("commands", self._since.commands),
            self._segments(),
            self._changed(),
        )
        found = self._query(_PUBLISHED).fetchone()
        pruned = self._query(_PRUNED_BEFORE).fetchone()
        digests = self._query("SELECT value FROM meta WHERE key = 'rows'").fetchone()
        last = "SELECT seq, time FROM events ORDER BY seq DESC LIMIT 1"
        newest = self._query(_SNAPSHOT, (snapshot,)).fetchone() if self._is_whole else None
        log = LogObject(
            number=0,
            is_whole=self._is_whole,
            position=position,
            published=found[0] if found else 0,
            pruned_before=pruned[0] if pruned else 0,
            rows=self._rows,
            gone=self._gone,
            tokens=None,
            trees={},
            snapshots={},
            digests=digests[0] if digests else None,
        )
        return Part(log, self._tokens, newest, self._query(last).fetchone())

    def _grown(self, table: str, since: int) -> int:
        limit = f"SELECT * FROM {table} WHERE seq > ? ORDER BY seq LIMIT {ROWS_AT_ONCE}"
        rows = self._rows[table] = self._query(limit, (since,)).fetchall()
        self._is_whole &= len(rows) < ROWS_AT_ONCE
        return int(rows[-1][0]) if rows else since

    def _segments(self) -> int:
        rows = self._rows["segments"] = []
        last, size = self._since.segments, 0
        for number, *row, tokens, logprobs, accepted in self._query(_SEGMENTS, (last,)):
            last = number
            rows.append((number, *row))
            self._tokens.segments.append((number, tokens, logprobs, accepted))
            size += len(tokens) + len(logprobs)
            if len(rows) == ROWS_AT_ONCE or size > BYTES_AT_ONCE:
                self._is_whole = False
                break
        return last

    def _changed(self) -> int:
        last = self._grown("changes", self._since.changes)
        for what, a, b in dict.fromkeys(row[1:] for row in self._rows["changes"]):
            where, key = _named(what, a, b)
            found = self._query(f"SELECT * FROM {what} WHERE {where}", key).fetchall()
            if not found:
                self._gone.append((what, a, b))
            self._rows.setdefault(what, []).extend(self._without_tokens(what, found))
        return last

    def _without_tokens(self, table: str, rows: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Rows as they go into the log; the rest goes to the tokens."""
        for row in rows:
            if table == "token_details":
                self._tokens.details.append(row)
                continue
            if table == "trajectories":
                group, member, length, reason, text, *rest = row
                if text is not None:
                    self._tokens.texts.append((group, member, text))
                row = (group, member, length, reason, None, *rest)
            yield row


def apply(
    connection: sqlite3.Connection,
    log: LogObject,
    tokens: TokensObject | None,
    pruned: set[int],
) -> None:
    """Put a part into a store, within a transaction; `pruned` are groups whose tokens are gone."""
    for what, a, b in log.gone:
        where, key = _named(what, a, b)
        connection.execute(f"DELETE FROM {what} WHERE {where}", key)
    for table, rows in log.rows.items():
        if table != "segments" and rows:
            marks = ", ".join("?" * len(rows[0]))
            connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)
    if tokens is None:
        return
    blobs = {row: rest for row, *rest in tokens.segments}
    connection.executemany(
        "INSERT OR REPLACE INTO segments (rowid, group_id, member, start, version, instance,"
        " steps, drafted, tokens, logprobs, accepted) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (row, group, *rest, *blobs[row])
            for row, group, *rest in log.rows["segments"]
            if group not in pruned
        ],
    )
    texts = [(text, group, member) for group, member, text in tokens.texts if group not in pruned]
    connection.executemany(
        "UPDATE trajectories SET text = ? WHERE group_id = ? AND member = ?", texts
    )
    details = [row for row in tokens.details if row[0] not in pruned]
    connection.executemany("INSERT OR REPLACE INTO token_details VALUES (?, ?, ?, ?)", details)


def _named(what: str, a: int, b: int) -> tuple[str, tuple[int, ...]]:
    """What a row of `changes` names: a condition, and its values."""
    columns = NOTED[what]
    return " AND ".join(f"{column} = ?" for column in columns), (a, b)[: len(columns)]


def pruned_in(log: LogObject) -> set[int]:
    """Groups whose tokens were gone when this was copied."""
    return {a for _, what, a, _ in log.rows.get("changes", ()) if what == "pruned"}


def groups_in(log: LogObject) -> set[int]:
    """Groups that the object of tokens beside this one has anything of."""
    named = {
        a for _, what, a, _ in log.rows["changes"] if what in ("trajectories", "token_details")
    }
    return named | {row[1] for row in log.rows["segments"]}
