"""The view of the log: events, and the commands that were given upon each, found by kind, group,
instance, time or text.

Holds true: rows are in the order in which things happened, a command after its event; an answer has
at most `PAGE` rows, looks at no more than `LOOKED_AT`, and says from where to go on; the SQL that
comes with it finds the same rows in the store alone, slowly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from rhymeflow.dashboard.run import Run
from rhymeflow.errors import UserError, nearest
from rhymeflow.store.reader import TrajectoryReader

PAGE = 100
LOOKED_AT = 20_000
EVENTS_AT_ONCE = 500


class Asked(NamedTuple):
    """Which rows are wanted."""

    kind: str = ""
    group: int | None = None
    instance: str = ""
    text: str = ""
    """The row's fields have it, as JSON, whatever the case."""
    time: float | None = None
    """Seconds of the run: from there on."""
    after: Place | None = None
    """Where another answer ended: event, whether it is a command, number."""


def listed(run: Run, asked: Asked) -> dict[str, Any]:
    """Rows of the log, and where to go on; `kinds` and `instances` are all that there are.

    Raises:
        UserError: there is no such kind or instance.
    """
    with run.reader() as reader:
        kinds = dict(reader.query("SELECT name, id FROM side.log_names WHERE what = 'kind'"))
        instances = dict(
            reader.query("SELECT name, id FROM side.log_names WHERE what = 'instance'")
        )
        begin = _begin(reader, asked)
        filters = [
            ("log_by_kind", _known(asked.kind, kinds, "kind")),
            ("log_by_instance", _known(asked.instance, instances, "instance")),
            ("log_by_group", asked.group),
        ]
        chosen = [(table, value) for table, value in filters if value is not None]
        lines = _chosen(reader, chosen, begin) if chosen else _all(reader, begin)
        rows, last, is_end = _matching(reader, lines, asked.text.lower())
        ((events, commands),) = reader.query(
            "SELECT (SELECT COALESCE(MAX(seq), 0) FROM events),"
            " (SELECT COALESCE(MAX(seq), 0) FROM commands)"
        )
    return {
        "events": events,
        "commands": commands,
        "kinds": sorted(kinds),
        "instances": sorted(instances),
        "rows": rows,
        "after": None if is_end else last,
        "sql": sql(asked),
    }


def sql(asked: Asked) -> str:
    """The same question to `events.db` alone."""
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
    if asked.time is not None:
        where.append(f"time >= {asked.time:g}")
    condition = f"\nWHERE {' AND '.join(where)}" if where else ""
    return (
        "SELECT seq, is_command, number, time, kind, body FROM (\n"
        "  SELECT seq, 0 AS is_command, seq AS number, time, kind, body FROM events UNION ALL\n"
        "  SELECT c.event, 1, c.seq, e.time, c.kind, c.body FROM commands c"
        " JOIN events e ON e.seq = c.event)"
        f"{condition}\nORDER BY seq, is_command, number;"
    )


Place = tuple[int, int, int]
"""Event, whether it is a command, number."""


class Line(NamedTuple):
    """A row of the log."""

    place: Place
    kind: str
    body: str


def _matching(
    reader: TrajectoryReader, lines: Iterator[Line], text: str
) -> tuple[list[dict[str, Any]], Place | None, bool]:
    """Lines that have the text; the last place that was looked at, and whether it was the end."""
    rows: list[dict[str, Any]] = []
    place = None
    for looked_at, (place, kind, body) in enumerate(lines, start=1):
        if text in body.lower():
            event, is_command, number = place
            ((time,),) = reader.query("SELECT time FROM events WHERE seq = ?", event)
            rows.append(
                {
                    "event": event,
                    "command": bool(is_command),
                    "number": number,
                    "time": time,
                    "kind": kind,
                    "body": msgspec.json.decode(body),
                }
            )
        if len(rows) == PAGE or looked_at == LOOKED_AT:
            return rows, place, False
    return rows, place, True


def _chosen(
    reader: TrajectoryReader, chosen: list[tuple[str, int]], begin: Place
) -> Iterator[Line]:
    """Lines after `begin` that all of these tables have for their values."""
    (first, value), *others = chosen
    also = "".join(
        f" AND EXISTS (SELECT 1 FROM side.{table} o WHERE o.value = ?"
        " AND (o.event, o.is_command, o.number) = (f.event, f.is_command, f.number))"
        for table, _ in others
    )
    statement = (
        f"SELECT event, is_command, number FROM side.{first} f WHERE f.value = ?"
        f" AND (event, is_command, number) > (?, ?, ?){also}"
        " ORDER BY event, is_command, number LIMIT ?"
    )
    while True:
        places = reader.query(statement, value, *begin, *(each for _, each in others), PAGE)
        for place in places:
            table = "commands" if place[1] else "events"
            yield Line(
                place, *reader.query(f"SELECT kind, body FROM {table} WHERE seq = ?", place[2])[0]
            )
        if len(places) < PAGE:
            return
        begin = places[-1]


def _all(reader: TrajectoryReader, begin: Place) -> Iterator[Line]:
    """All lines after `begin`."""
    ((last,),) = reader.query("SELECT COALESCE(MAX(seq), 0) FROM events")
    for start in range(max(begin[0], 1), last + 1, EVENTS_AT_ONCE):
        end = min(start + EVENTS_AT_ONCE - 1, last)
        events = reader.query(
            "SELECT seq, kind, body FROM events WHERE seq BETWEEN ? AND ?", start, end
        )
        commands = reader.query(
            "SELECT event, seq, kind, body FROM commands WHERE seq > ? AND seq <= ? ORDER BY seq",
            reader.last_command_upto(start - 1),
            reader.last_command_upto(end),
        )
        lines = [Line((seq, 0, seq), *rest) for seq, *rest in events]
        lines += [Line((event, 1, seq), *rest) for event, seq, *rest in commands]
        yield from (line for line in sorted(lines) if line.place > begin)


def _begin(reader: TrajectoryReader, asked: Asked) -> Place:
    """The place after which rows are wanted."""
    if asked.after is not None:
        return asked.after
    if asked.time is None:
        return 0, 0, 0
    ((last,),) = reader.query("SELECT COALESCE(MAX(seq), 0) FROM events")
    low, high = 1, last + 1
    while low < high:  # times rise with numbers
        middle = (low + high) // 2
        ((time,),) = reader.query("SELECT time FROM events WHERE seq = ?", middle)
        low, high = (middle + 1, high) if time < asked.time else (low, middle)
    return low, 0, 0


def _known(name: str, known: dict[str, int], what: str) -> int | None:
    if not name:
        return None
    if name not in known:
        raise UserError(f"the log has no {what} {name!r}{nearest(name, known)}")
    return known[name]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


__all__ = ["PAGE", "Asked", "listed", "sql"]
