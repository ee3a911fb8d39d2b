"""The view of the log: events, and the commands that were given upon each, found by kind, group,
instance, time or text.

Holds true: rows are in the order in which things happened, a command after its event; an answer has
at most `PAGE` rows, looks at no more than `LOOKED_AT`, and says from where to go on; the SQL that
comes with it finds the same rows in the store alone, slowly.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import msgspec

from rhymeflow.dashboard.run import Run
from rhymeflow.errors import UserError, nearest
from rhymeflow.store.reader import TrajectoryReader

PAGE = 100
LOOKED_AT = 20_000


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
        kinds, instances = _names(reader, "kind"), _names(reader, "instance")
        begin = _begin(reader, asked)
        filters = [("log_by_group", asked.group)] if asked.group is not None else []
        named = [("kind", asked.kind, kinds), ("instance", asked.instance, instances)]
        wanted = [(_known(name, known, what), what) for what, name, known in named if name]
        # The one with the fewest lines first: only of these is looked at what else is wanted.
        filters += [(f"log_by_{what}", id_) for (_, id_), what in sorted(wanted)]
        look = _chosen if filters else _all
        with reader.one_state():
            lines, end = look(reader, begin, asked.text, filters)
        rows = [_row(line) for line in lines[:PAGE]]
        after = lines[PAGE - 1].place if len(lines) >= PAGE else end
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
        "after": after,
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
    time: float
    kind: str
    body: str


Found = tuple[list[Line], Place | None]
"""Lines in order, at least the first `PAGE` that there are, and the place up to which was looked;
None: to the end of the log."""


def _has_text(body: str, text: str) -> tuple[str, list[str]]:
    """A condition on lines, and its values."""
    return (f" AND INSTR(LOWER({body}), LOWER(?))", [text]) if text else ("", [])


def _row(line: Line) -> dict[str, Any]:
    event, is_command, number = line.place
    return {
        "event": event,
        "command": bool(is_command),
        "number": number,
        "time": line.time,
        "kind": line.kind,
        "body": msgspec.json.decode(line.body),
    }


def _chosen(
    reader: TrajectoryReader, begin: Place, text: str, filters: list[tuple[str, int]]
) -> Found:
    """Lines after `begin` that all of these tables have for their values. Of the first table no
    more than `LOOKED_AT` places are looked at."""
    (first, value), *others = filters
    part = f"FROM side.{first} f WHERE value = ? AND (event, is_command, number) > (?, ?, ?)"
    ends = reader.query(
        f"SELECT event, is_command, number {part} ORDER BY event, is_command, number"
        " LIMIT 1 OFFSET ?",
        *(value, *begin, LOOKED_AT - 1),
    )
    also = "".join(
        f" AND EXISTS (SELECT 1 FROM side.{table} o WHERE o.value = ?"
        " AND (o.event, o.is_command, o.number) = (f.event, f.is_command, f.number))"
        for table, _ in others
    )
    has_text, texts = _has_text("COALESCE(c.body, e.body)", text)
    rows = reader.query(
        "SELECT f.event, f.is_command, f.number, e.time,"
        " COALESCE(c.kind, e.kind), COALESCE(c.body, e.body)"
        f" FROM (SELECT event, is_command, number {part}"
        " AND (event, is_command, number) <= (?, ?, ?)) f"
        " CROSS JOIN events e ON e.seq = f.event"
        " LEFT JOIN commands c ON f.is_command AND c.seq = f.number"
        f" WHERE 1{also}{has_text} ORDER BY f.event, f.is_command, f.number LIMIT {PAGE}",
        *(value, *begin, *(ends[0] if ends else _BEYOND)),
        *(each for _, each in others),
        *texts,
    )
    return [Line(row[:3], *row[3:]) for row in rows], ends[0] if ends else None


_BEYOND = (sys.maxsize,) * 3
"""A place after all others."""


def _all(reader: TrajectoryReader, begin: Place, text: str, _: object) -> Found:
    """Lines after `begin`, of no more than `LOOKED_AT`: half of them events, half commands."""
    event, is_command, number = begin
    first = event + (is_command or number >= event)
    done = number if is_command else reader.last_command_upto(event - 1)
    last, upto = first + LOOKED_AT // 2 - 1, done + LOOKED_AT // 2
    ((newest,),) = reader.query("SELECT COALESCE(MAX(seq), 0) FROM events")
    its_event = reader.query("SELECT event FROM commands WHERE seq = ?", upto)
    end: Place | None
    if its_event and its_event[0][0] <= last:  # the commands end first, and the events with them
        last = its_event[0][0]
        end = last, 1, upto
    elif last < newest:
        upto = reader.last_command_upto(last - 1)
        end = last, 0, last
    else:
        upto, end = sys.maxsize, None
    has_text, texts = _has_text("body", text)
    events = reader.query(
        "SELECT seq, 0, seq, time, kind, body FROM events WHERE seq BETWEEN ? AND ?"
        f"{has_text} ORDER BY seq LIMIT {PAGE}",
        *(first, last, *texts),
    )
    commands = reader.query(
        "SELECT event, 1, seq, (SELECT time FROM events e WHERE e.seq = event), kind, body"
        f" FROM commands WHERE seq > ? AND seq <= ?{has_text} ORDER BY seq LIMIT {PAGE}",
        *(done, upto, *texts),
    )
    return sorted(Line(row[:3], *row[3:]) for row in events + commands), end


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


def _names(reader: TrajectoryReader, what: str) -> dict[str, tuple[int, int]]:
    """By name, how many lines it has, and its number."""
    rows = reader.query("SELECT name, lines, id FROM side.log_names WHERE what = ?", what)
    return {name: (lines, id_) for name, lines, id_ in rows}


def _known(name: str, known: dict[str, tuple[int, int]], what: str) -> tuple[int, int]:
    if name not in known:
        raise UserError(f"the log has no {what} {name!r}{nearest(name, known)}")
    return known[name]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


__all__ = ["PAGE", "Asked", "listed", "sql"]
