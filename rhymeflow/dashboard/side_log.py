"""The side index of a run's log: which events and commands are of a kind, a group, an instance;
what went on when; and when the groups of each batch began and were complete.

Holds true: rows are of the log up to the mark `log_event`, whole; the log only grows, so they are
never changed. A command comes after the event upon which it was given. `log_names` says of each
kind and instance how many lines it has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec

from rhymeflow.dashboard import filling, side_spans, spans
from rhymeflow.dashboard.spans import Fold
from rhymeflow.store.reader import TrajectoryReader

EVENTS_AT_ONCE = 10_000

_BY = ("log_by_kind", "log_by_instance", "log_by_group")
_TABLE = """CREATE TABLE side.{} (value INTEGER, event INTEGER, is_command INTEGER,
    number INTEGER, PRIMARY KEY (value, event, is_command, number)) WITHOUT ROWID;"""
_NAMES = """CREATE TABLE side.log_names (id INTEGER PRIMARY KEY, what TEXT, name TEXT,
    lines INTEGER, UNIQUE (what, name));"""
_FILLING = """CREATE TABLE side.filling (version INTEGER, group_id INTEGER, began REAL,
    complete REAL, trained REAL, PRIMARY KEY (version, group_id)) WITHOUT ROWID;"""
TABLES = _NAMES + _FILLING + "".join(_TABLE.format(table) for table in _BY)

# One part of the log: of each line its place, its kind, its fields, and what it is found by. What
# names many groups is looked for by its field's name first, since few lines have one.
_LINES = """CREATE TEMP TABLE lines AS
    SELECT *, json_extract(body, '$.instance') AS instance,
        COALESCE(json_extract(body, '$.trajectory[0]'), json_extract(body, '$.group')) AS one_group,
        INSTR(body, '"groups"') OR INSTR(body, '"trajectories"') AS has_many
    FROM (SELECT seq AS event, 0 AS is_command, seq AS number, kind, body FROM events
        WHERE seq BETWEEN ? AND ?
        UNION ALL SELECT event, 1, seq, kind, body FROM commands WHERE seq > ? AND seq <= ?)"""
_COUNT = """INSERT INTO side.log_names (what, name, lines)
    SELECT '{0}', {0}, COUNT(*) FROM temp.lines WHERE {0} IS NOT NULL GROUP BY {0}
    ON CONFLICT (what, name) DO UPDATE SET lines = lines + excluded.lines"""
_NAMED = """INSERT INTO side.log_by_{0} SELECT n.id, event, is_command, number
    FROM temp.lines JOIN side.log_names n ON n.what = '{0}' AND n.name = {0}"""
_PUT = (
    *(_COUNT.format(what) for what in ("kind", "instance")),
    *(_NAMED.format(what) for what in ("kind", "instance")),
    """INSERT INTO side.log_by_group
    SELECT one_group, event, is_command, number FROM temp.lines
    WHERE one_group IS NOT NULL AND NOT has_many
    UNION ALL SELECT * FROM (
        SELECT one_group, event, is_command, number FROM temp.lines
        WHERE one_group IS NOT NULL AND has_many
        UNION SELECT j.value, event, is_command, number
        FROM temp.lines, json_each(body, '$.groups') j WHERE has_many
        UNION SELECT json_extract(j.value, '$[0]'), event, is_command, number
        FROM temp.lines, json_each(body, '$.trajectories') j WHERE has_many)""",
)
_FOLDED = f"""SELECT e.time, l.kind, l.body FROM temp.lines l JOIN events e ON e.seq = l.event
    WHERE l.kind IN ({", ".join(f"'{kind}'" for kind in sorted(spans.KINDS | filling.KINDS))})
    ORDER BY l.event, l.is_command, l.number"""


def follow(reader: TrajectoryReader) -> Iterator[float]:
    """Take in what the log has more, part by part, and say which share of it is done; `reader` has
    the side index attached, to be written to."""
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
            _put_folded(reader, end)
            reader.query("DROP TABLE temp.lines")
            reader.query("INSERT OR REPLACE INTO side.marks VALUES ('log_event', ?)", end)
        yield end / last


def last_event(reader: TrajectoryReader) -> tuple[int, float]:
    """The number and the time of the last event, than which none is later; 0 if there is none."""
    rows = reader.query("SELECT seq, time FROM events ORDER BY seq DESC LIMIT 1")
    return (rows[0][0], rows[0][1]) if rows else (0, 0.0)


def fold(reader: TrajectoryReader) -> Fold:
    """The fold of the log as far as it is taken in: what goes on at its end."""
    return Fold(_state(reader, "spans"))


def groups(reader: TrajectoryReader) -> filling.Fold:
    """The same of groups: those that have not ended at its end."""
    return filling.Fold(_state(reader, "filling"))


def _state(reader: TrajectoryReader, name: str) -> dict[str, Any] | None:
    rows = reader.query("SELECT value FROM side.marks WHERE name = ?", name)
    return msgspec.json.decode(rows[0][0]) if rows else None


def _put_folded(reader: TrajectoryReader, end: int) -> None:
    """Take the lines of this part, up to event `end`, into the folds, and put what has ended."""
    found, filled = fold(reader), groups(reader)
    lines = [(time, kind, msgspec.json.decode(body)) for time, kind, body in reader.query(_FOLDED)]
    found.take(lines)
    ((found.time,),) = reader.query("SELECT time FROM events WHERE seq = ?", end)
    side_spans.put(reader, found.ended)
    filled.take(lines)
    for row in filled.ended:
        reader.query("INSERT INTO side.filling VALUES (?, ?, ?, ?, ?)", *row)
    for name, state in (("spans", found.state()), ("filling", filled.state())):
        mark = msgspec.json.encode(state)
        reader.query("INSERT OR REPLACE INTO side.marks VALUES (?, ?)", name, mark)


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


__all__ = ["TABLES", "fold", "follow", "groups", "last_event", "transaction"]
