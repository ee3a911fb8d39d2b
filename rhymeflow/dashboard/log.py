"""The view of the log: events and the commands that they caused, the newest first. A response
searches `LOOKED_AT` events and has at most `PAGE` rows, the place where the next page begins, and
the SQL that selects the same rows."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import Any, NamedTuple

import msgspec

from rhymeflow.dashboard.run import Run
from rhymeflow.errors import UserError, nearest
from rhymeflow.store.reader import TrajectoryReader

PAGE = 100
LOOKED_AT = 100_000

_COUNTS = """SELECT (SELECT COALESCE(MAX(seq), 0) FROM events),
    (SELECT COALESCE(MAX(seq), 0) FROM commands)"""
_PROBLEMS = """SELECT seq AS event, time, kind, json_extract(body, '$.instance') AS instance,
        SUBSTR(json_extract(body, IIF(kind LIKE '%Failed', '$.error', '$.reason')), 1, 500) AS said,
        json_extract(body, '$.trajectory[0]') AS "group" FROM events
    WHERE seq > ? AND seq <= ? AND (
        kind IN ('InstanceLeft', 'EnvironmentFailed', 'ProgramLost', 'RewardFailed')
        OR (kind = 'VersionPublished' AND json_array_length(body, '$.skipped') > 0))
    ORDER BY seq"""
_JOINED = """SELECT json_extract(body, '$.instance') FROM events
    WHERE kind = 'InstanceJoined' AND seq > ?"""

Place = tuple[int, int, int]  # (number of the event, 1 for a command else 0, number of the row)


class LogNames:
    """All kinds and instances in the log, and what went wrong."""

    def __init__(self, reader: TrajectoryReader) -> None:
        self.reader = reader
        self.kinds: set[str] = set()
        self.instances: set[str] = set()
        self.problems: deque[dict[str, Any]] = deque(maxlen=PAGE)
        self._events = self._commands = 0

    def follow(self) -> None:
        """Read the new rows."""
        ((events, commands),) = self.reader.query(_COUNTS)
        for names, statement, since in (
            (self.kinds, "SELECT DISTINCT kind FROM events WHERE seq > ?", self._events),
            (self.kinds, "SELECT DISTINCT kind FROM commands WHERE seq > ?", self._commands),
            (self.instances, _JOINED, self._events),
        ):
            names.update(name for (name,) in self.reader.query(statement, since))
        self.problems.extend(self.reader.records(_PROBLEMS, self._events, events))
        self._events, self._commands = events, commands


class LogQuery(NamedTuple):
    """Selects rows of the log."""

    kind: str = ""
    group: int | None = None
    instance: str = ""
    text: str = ""  # part of the row's fields as JSON; ASCII letters match in either case
    time: float | None = None  # least time of a row, in seconds of the run
    after: Place | None = None


def listed(run: Run, asked: LogQuery) -> dict[str, Any]:
    """Return a page of rows, the place `after` which the next page begins, all `kinds` and
    `instances`, and the newest `problems`. Raises `UserError` if there is no such kind or
    instance."""
    with run.kept(LogNames) as names:
        known = {"kind": sorted(names.kinds), "instance": sorted(names.instances)}
        problems = list(names.problems)
    for what, name in (("kind", asked.kind), ("instance", asked.instance)):
        if name and name not in known[what]:
            raise UserError(f"the log has no {what} {name!r}{nearest(name, known[what])}")
    with run.reader() as reader, reader.one_state():
        rows, end = _found(reader, asked)
        ((events, commands),) = reader.query(_COUNTS)
    return {
        "events": events,
        "commands": commands,
        "kinds": known["kind"],
        "instances": known["instance"],
        "problems": problems,
        "rows": [_row(*row) for row in rows],
        "after": rows[-1][:3] if len(rows) == PAGE else end,
        "sql": sql(asked),
    }


def sql(asked: LogQuery) -> str:
    """Return the query as SQL for `events.db`."""
    conditions = _conditions(asked)
    if asked.time is not None:
        conditions.append(f"time >= {asked.time:g}")
    where = f"\nWHERE {' AND '.join(conditions)}" if conditions else ""
    return (
        "SELECT seq, is_command, number, time, kind, body FROM (\n"
        "  SELECT seq, 0 AS is_command, seq AS number, time, kind, body FROM events UNION ALL\n"
        "  SELECT c.event, 1, c.seq, e.time, c.kind, c.body FROM commands c"
        " JOIN events e ON e.seq = c.event)"
        f"{where}\nORDER BY seq DESC, is_command DESC, number DESC;"
    )


def _conditions(asked: LogQuery) -> list[str]:
    """Return SQL conditions on `kind` and `body` of a row, with the values in them."""
    where = []
    if asked.kind:
        where.append(f"kind = {_quoted(asked.kind)}")
    if asked.instance:
        where.append(f"json_extract(body, '$.instance') = {_quoted(asked.instance)}")
    if asked.group is not None:
        where.append(
            f"({asked.group} IN (json_extract(body, '$.trajectory[0]'),"
            " json_extract(body, '$.group'))"
            f" OR EXISTS (SELECT 1 FROM json_each(body, '$.groups') WHERE value = {asked.group})"
            " OR EXISTS (SELECT 1 FROM json_each(body, '$.trajectories')"
            f" WHERE json_extract(value, '$[0]') = {asked.group}))"
        )
    if asked.text:
        where.append(f"INSTR(LOWER(body), LOWER({_quoted(asked.text)}))")
    return where


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''").replace("\0", "' || CHAR(0) || '") + "'"


def _row(event: int, is_command: int, number: int, time: float, kind: str, body: str) -> Any:
    return {
        "event": event,
        "command": bool(is_command),
        "number": number,
        "time": time,
        "kind": kind,
        "body": msgspec.json.decode(body),
    }


def _found(reader: TrajectoryReader, asked: LogQuery) -> tuple[list[tuple[Any, ...]], Place | None]:
    """Return the newest rows, and the place where the search ended, None at the log's beginning."""
    ((newest, _),) = reader.query(_COUNTS)
    event, is_command, number = asked.after or (newest + 1, 0, 0)
    last = event if is_command else event - 1
    done = number if is_command else reader.last_command_upto(last) + 1
    begin = 1 if asked.time is None else _first_at(reader, newest, asked.time)
    first = max(last - LOOKED_AT + 1, begin)
    # Parsing JSON is slow: rows without the digits of the group are left out first.
    digits = [f"INSTR(body, '{asked.group}')"] if asked.group is not None else []
    condition = "".join(f" AND {each}" for each in digits + _conditions(asked))
    rows = reader.query(
        "SELECT seq, 0, seq, time, kind, body FROM events WHERE seq BETWEEN ? AND ?"
        f"{condition} ORDER BY seq DESC LIMIT {PAGE}",
        *(first, last),
    )
    rows += reader.query(
        "SELECT event, 1, seq, (SELECT time FROM events e WHERE e.seq = event), kind, body"
        f" FROM commands WHERE seq > ? AND seq < ?{condition} ORDER BY seq DESC LIMIT {PAGE}",
        *(reader.last_command_upto(first - 1), done),
    )
    return sorted(rows, reverse=True)[:PAGE], None if first <= begin else (first, 0, first)


def _first_at(reader: TrajectoryReader, newest: int, time: float) -> int:
    """Return the first event that is not before `time`; times rise."""
    time_of = "SELECT time FROM events WHERE seq = ?"
    events = range(1, newest + 1)
    return 1 + bisect_left(events, time, key=lambda event: reader.query(time_of, event)[0][0])
