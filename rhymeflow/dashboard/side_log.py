"""The side index of a run's log: which events and commands are of a kind, a group, an instance;
what went on when; and when the groups of each batch began and were complete.

Holds true: rows are of the log up to the mark `log_event`, whole; the log only grows, so they are
never changed. A command comes after the event upon which it was given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec

from rhymeflow.dashboard import filling
from rhymeflow.dashboard.spans import Fold
from rhymeflow.store.reader import TrajectoryReader

EVENTS_AT_ONCE = 20_000

_BY = ("log_by_kind", "log_by_instance", "log_by_group")
_TABLE = """CREATE TABLE side.{} (value INTEGER, event INTEGER, is_command INTEGER,
    number INTEGER, PRIMARY KEY (value, event, is_command, number)) WITHOUT ROWID;"""
_NAMES = """CREATE TABLE side.log_names (id INTEGER PRIMARY KEY, what TEXT, name TEXT,
    UNIQUE (what, name));"""
_SPANS = """CREATE TABLE side.spans (lane TEXT, kind TEXT, start REAL, end REAL, version INTEGER);
CREATE INDEX side.spans_by_end ON spans (end);"""
_FILLING = """CREATE TABLE side.filling (version INTEGER, group_id INTEGER, began REAL,
    complete REAL, trained REAL, PRIMARY KEY (version, group_id)) WITHOUT ROWID;"""
TABLES = _NAMES + _SPANS + _FILLING + "".join(_TABLE.format(table) for table in _BY)

# One part of the log: of each line its place, its kind and its fields.
_LINES = """CREATE TEMP TABLE lines AS
    SELECT seq AS event, 0 AS is_command, seq AS number, kind, body FROM events
    WHERE seq BETWEEN ? AND ?
    UNION ALL SELECT event, 1, seq, kind, body FROM commands WHERE seq > ? AND seq <= ?"""
_PUT = (
    """INSERT OR IGNORE INTO side.log_names (what, name)
    SELECT DISTINCT 'kind', kind FROM temp.lines UNION
    SELECT DISTINCT 'instance', json_extract(body, '$.instance') FROM temp.lines
    WHERE json_extract(body, '$.instance') IS NOT NULL""",
    """INSERT INTO side.log_by_kind SELECT n.id, event, is_command, number
    FROM temp.lines JOIN side.log_names n ON n.what = 'kind' AND n.name = kind""",
    """INSERT INTO side.log_by_instance SELECT n.id, event, is_command, number
    FROM temp.lines JOIN side.log_names n
    ON n.what = 'instance' AND n.name = json_extract(body, '$.instance')""",
    """INSERT INTO side.log_by_group
    SELECT COALESCE(json_extract(body, '$.trajectory[0]'), json_extract(body, '$.group')) AS g,
        event, is_command, number FROM temp.lines WHERE g IS NOT NULL
    UNION SELECT j.value, event, is_command, number
        FROM temp.lines, json_each(body, '$.groups') j
    UNION SELECT json_extract(j.value, '$[0]'), event, is_command, number
        FROM temp.lines, json_each(body, '$.trajectories') j""",
)


def follow(reader: TrajectoryReader) -> None:
    """Take in what the log has more; `reader` has the side index attached, to be written to."""
    ((last,),) = reader.query("SELECT COALESCE(MAX(seq), 0) FROM events")
    rows = reader.query("SELECT value FROM side.marks WHERE name = 'log_event'")
    done = int(rows[0][0]) if rows else 0
    for start in range(done + 1, last + 1, EVENTS_AT_ONCE):
        end = min(start + EVENTS_AT_ONCE - 1, last)
        with transaction(reader):
            commands = [reader.last_command_upto(each) for each in (start - 1, end)]
            reader.query(_LINES, start, end, *commands)
            for statement in _PUT:
                reader.query(statement)
            _put_folded(reader)
            reader.query("DROP TABLE temp.lines")
            reader.query("INSERT OR REPLACE INTO side.marks VALUES ('log_event', ?)", end)


def fold(reader: TrajectoryReader) -> Fold:
    """The fold of the log as far as it is taken in: what goes on at its end."""
    return Fold(_state(reader, "spans"))


def groups(reader: TrajectoryReader) -> filling.Fold:
    """The same of groups: those that have not ended at its end."""
    return filling.Fold(_state(reader, "filling"))


def _state(reader: TrajectoryReader, name: str) -> dict[str, Any] | None:
    rows = reader.query("SELECT value FROM side.marks WHERE name = ?", name)
    return msgspec.json.decode(rows[0][0]) if rows else None


def _put_folded(reader: TrajectoryReader) -> None:
    """Take the lines of this part into the folds, and put what has ended."""
    found, filled = fold(reader), groups(reader)
    lines = [
        (time, kind, msgspec.json.decode(body))
        for time, kind, body in reader.query(
            "SELECT e.time, l.kind, l.body FROM temp.lines l JOIN events e ON e.seq = l.event"
            " ORDER BY l.event, l.is_command, l.number"
        )
    ]
    for name, each in (("spans", found), ("filling", filled)):
        each.take(lines)
        for row in each.ended:
            reader.query(f"INSERT INTO side.{name} VALUES (?, ?, ?, ?, ?)", *row)
        state = msgspec.json.encode(each.state())
        reader.query("INSERT OR REPLACE INTO side.marks VALUES (?, ?)", name, state)


@contextlib.contextmanager
def transaction(reader: TrajectoryReader) -> Iterator[None]:
    """One of the side index; of the store it reads one state."""
    reader.query("BEGIN")
    try:
        yield
    except BaseException:
        reader.query("ROLLBACK")
        raise
    reader.query("COMMIT")


__all__ = ["TABLES", "fold", "follow", "groups", "transaction"]
