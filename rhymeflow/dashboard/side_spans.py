"""The side index of what went on when: spans by lane and kind, and how much time they cover.

Holds true: spans of one lane and kind do not overlap and are numbered from 1 in the order of their
starts; `before` is the time that those before it cover, so how long a lane did something between
two moments is found by two of its spans, however many lie between. `lanes` has what is known of all
spans of a lane and kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rhymeflow.dashboard.spans import Span
from rhymeflow.store.reader import TrajectoryReader

TABLES = """CREATE TABLE side.spans (lane INTEGER, start REAL, number INTEGER, end REAL,
    version INTEGER, before REAL, PRIMARY KEY (lane, start, number)) WITHOUT ROWID;
CREATE TABLE side.lanes (id INTEGER PRIMARY KEY, lane TEXT, kind TEXT, spans INTEGER, covered REAL,
    UNIQUE (lane, kind));"""

Shares = dict[str, dict[str, NDArray[np.float64]]]
"""By lane and kind, the share of each part of a window that spans cover, [parts]."""

# Of a lane and kind, the last span that began before a moment, or not after it.
_LAST = """SELECT number, start, end FROM side.spans WHERE lane = ? AND start {} ?
    ORDER BY start DESC, number DESC LIMIT 1"""
_FROM = """SELECT start, end, version FROM side.spans
    WHERE lane = ? AND start >= ? AND start <= ? AND end >= ? ORDER BY start, number"""
# The time covered until each edge: before the span that began last, and of that what has passed.
_COVERED = """SELECT COALESCE((SELECT before + MIN(end, e.time) - start FROM side.spans
        WHERE lane = ? AND start <= e.time ORDER BY start DESC, number DESC LIMIT 1),
    0.0) FROM temp.edges e ORDER BY e.time"""


class Lane(NamedTuple):
    """A lane and a kind of span: a row of `lanes`."""

    id: int
    name: str
    kind: str
    spans: int
    covered: float


def put(reader: TrajectoryReader, ended: Iterable[Span]) -> None:
    """Add spans that have ended since, in order."""
    known = {(each.name, each.kind): each for each in _lanes(reader)}
    for name, kind, start, end, version in ended:
        lane = known.get((name, kind)) or Lane(len(known) + 1, name, kind, 0, 0.0)
        reader.query(
            "INSERT INTO side.spans VALUES (?, ?, ?, ?, ?, ?)",
            *(lane.id, start, lane.spans + 1, end, version, lane.covered),
        )
        covered = lane.covered + end - start
        known[name, kind] = lane._replace(spans=lane.spans + 1, covered=covered)
    for lane in known.values():
        reader.query("INSERT OR REPLACE INTO side.lanes VALUES (?, ?, ?, ?, ?)", *lane)


def within(reader: TrajectoryReader, start: float, stop: float) -> list[Span]:
    """All spans that reach into the time from `start` to `stop`."""
    return [span for lane in _lanes(reader) for span in _spans(reader, lane, start, stop)]


def bounded(
    reader: TrajectoryReader, start: float, stop: float, most: int
) -> tuple[list[Span], Shares]:
    """Spans that reach into the time from `start` to `stop`; of lanes that have more than `most`
    of them the shares of `most` parts of it instead."""
    counts: dict[str, dict[Lane, int]] = {}
    for lane in _lanes(reader):
        counts.setdefault(lane.name, {})[lane] = _count(reader, lane, start, stop)
    spans: list[Span] = []
    found: Shares = {}
    edges = np.linspace(start, stop, most + 1)
    for name, lanes in counts.items():
        if sum(lanes.values()) <= most:
            spans += [span for lane in lanes for span in _spans(reader, lane, start, stop)]
            continue
        if not found:
            _put_edges(reader, edges.tolist())
        here = [lane for lane, count in lanes.items() if count]
        found[name] = {lane.kind: _shares(reader, lane, edges) for lane in here}
    return spans, found


def _lanes(reader: TrajectoryReader) -> list[Lane]:
    return [Lane(*row) for row in reader.query("SELECT * FROM side.lanes ORDER BY id")]


def _spans(reader: TrajectoryReader, lane: Lane, start: float, stop: float) -> list[Span]:
    before = reader.query(_LAST.format("<"), lane.id, start)
    first = before[0][1] if before else start
    rows = reader.query(_FROM, lane.id, first, stop, start)
    return [Span(lane.name, lane.kind, *row) for row in rows]


def _count(reader: TrajectoryReader, lane: Lane, start: float, stop: float) -> int:
    last = reader.query(_LAST.format("<="), lane.id, stop)
    before = reader.query(_LAST.format("<"), lane.id, start)
    ended = before[0][0] - (before[0][2] >= start) if before else 0
    return last[0][0] - ended if last else 0


def _put_edges(reader: TrajectoryReader, edges: list[float]) -> None:
    reader.query("CREATE TEMP TABLE edges (time REAL)")
    reader.query(f"INSERT INTO temp.edges VALUES {', '.join(['(?)'] * len(edges))}", *edges)


def _shares(
    reader: TrajectoryReader, lane: Lane, edges: NDArray[np.float64]
) -> NDArray[np.float64]:
    covered = np.array([each for (each,) in reader.query(_COVERED, lane.id)])
    parts: NDArray[np.float64] = np.diff(covered) / np.diff(edges)
    return parts


__all__ = ["TABLES", "Shares", "bounded", "put", "within"]
