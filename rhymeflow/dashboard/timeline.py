"""What went on when in a run, and how its batches filled: folds over its log, kept in memory.

A group has an entry of a staleness buffer from its first `Route` on, and an occupied one when as
many of its responses are rewarded as are trained on (StaleFlow, section 4.2). Entries move between
buffers before their batch is trained; here a group belongs to the batch that trained on it.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left, bisect_right
from typing import Any, NamedTuple

import msgspec

from rhymeflow.dashboard import spans
from rhymeflow.dashboard.spans import Span
from rhymeflow.store.reader import TrajectoryReader

EVENTS_AT_ONCE = 5_000

_FILLING = frozenset({"Route", "TrajectoryRewarded", "Train", "Drop"})
_KINDS = ", ".join(f"'{kind}'" for kind in sorted({*spans.KINDS, *_FILLING}))
_LINES = f"""
SELECT time, kind, body FROM (
    SELECT seq AS event, 0 AS is_command, seq AS number, time, kind, body FROM events
        WHERE seq BETWEEN ?1 AND ?2 AND kind IN ({_KINDS})
    UNION ALL SELECT c.event, 1, c.seq, e.time, c.kind, c.body
        FROM commands c JOIN events e ON e.seq = c.event
        WHERE c.seq > ?3 AND c.seq <= ?4 AND c.kind IN ({_KINDS}))
ORDER BY event, is_command, number"""

_JOINED = """SELECT json_extract(body, '$.instance') FROM events
    WHERE kind = 'InstanceJoined' AND seq > ?"""


class Lane:
    """Spans of one lane and kind, in order; none begins before another has ended."""

    def __init__(self) -> None:
        self.starts, self.ends, self.versions = array("d"), array("d"), array("q")

    def put(self, span: Span) -> None:
        """Add one that ended after all others."""
        self.starts.append(span.start)
        self.ends.append(span.end)
        self.versions.append(-1 if span.version is None else span.version)

    def between(self, start: float, stop: float) -> Lane:
        """Those that reach into this time."""
        those = slice(bisect_left(self.ends, start), bisect_right(self.starts, stop))
        found = Lane()
        found.starts, found.ends = self.starts[those], self.ends[those]
        found.versions = self.versions[those]
        return found

    def __len__(self) -> int:
        """How many."""
        return len(self.starts)


class Filled(NamedTuple):
    """A group of a batch: when it began and when it was complete, seconds of the run."""

    began: float
    complete: float


class Batch(NamedTuple):
    """A batch that was trained on, and when."""

    version: int
    trained: float
    groups: list[Filled]


class Filling:
    """Takes in the log line by line; `batches` has what was trained on."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self._open: dict[int, list[float]] = {}
        """Of a group that has begun: when, and when each of its rewards came."""

    def open(self) -> list[float]:
        """When the groups began that have not ended."""
        return [times[0] for times in self._open.values()]

    def take(self, now: float, kind: str, body: dict[str, Any]) -> None:
        """The time, kind and fields of an event or a command; they come in order."""
        if kind == "Route":
            self._open.setdefault(body["trajectory"][0], [now])
        elif kind == "TrajectoryRewarded":
            if (found := self._open.get(body["trajectory"][0])) is not None:
                found.append(now)
        elif kind == "Train":
            self._train(now, body)
        elif kind == "Drop":
            self._open.pop(body["group"], None)

    def _train(self, now: float, body: dict[str, Any]) -> None:
        groups = []
        for group, members in zip(body["groups"], body["members"], strict=False):
            began, *rewards = self._open.pop(group, [0.0])
            if 0 < len(members) <= len(rewards):  # else the log has no such group
                groups.append(Filled(began, rewards[len(members) - 1]))
        if groups:
            self.batches.append(Batch(body["version"], now, groups))


class Timeline:
    """The log as far as it was read; `follow` reads on."""

    def __init__(self, reader: TrajectoryReader) -> None:
        self.reader = reader
        self.lanes: dict[tuple[str, str], Lane] = {}
        """By lane and kind, spans that have ended."""
        self.filling = Filling()
        self._fold = spans.Fold()
        self._done = 0

    def follow(self, seconds: float) -> float:
        """Read what the log has more, for about so many seconds; return the share of it that has
        been read."""
        until = time.monotonic() + seconds
        ((last,),) = self.reader.query("SELECT COALESCE(MAX(seq), 0) FROM events")
        while self._done < last:
            self._take(min(self._done + EVENTS_AT_ONCE, last))
            if time.monotonic() >= until:
                break
        return self._done / last if last else 1.0

    def within(self, start: float, stop: float) -> dict[tuple[str, str], Lane]:
        """By lane and kind, spans that reach into this time; what goes on ends with the last
        event."""
        parts = {key: lane.between(start, stop) for key, lane in self.lanes.items()}
        found = {key: part for key, part in parts.items() if part}
        for span in self._fold.open():
            if span.start <= stop and span.end >= start:
                found.setdefault((span.lane, span.kind), Lane()).put(span)
        return found

    def _take(self, last: int) -> None:
        commands = [self.reader.last_command_upto(each) for each in (self._done, last)]
        # Line by line, so that few objects live at once: the garbage collector looks at all there
        # are in the process each time that many more have come.
        for now, kind, text in self.reader.query(_LINES, self._done + 1, last, *commands):
            body = msgspec.json.decode(text)
            if kind in spans.KINDS:
                self._fold.take(now, kind, body)
            if kind in _FILLING:
                self.filling.take(now, kind, body)
        ((self._fold.time,),) = self.reader.query("SELECT time FROM events WHERE seq = ?", last)
        for span in self._fold.ended:
            self.lanes.setdefault((span.lane, span.kind), Lane()).put(span)
        self._fold.ended.clear()
        self._done = last


class LogNames:
    """Names that lines of the log have; `follow` looks at the lines that are new."""

    def __init__(self, reader: TrajectoryReader) -> None:
        self.reader = reader
        self.kinds: set[str] = set()
        self.instances: set[str] = set()
        self._events = self._commands = 0

    def follow(self) -> None:
        """Look at what the log has more."""
        ((events, commands),) = self.reader.query(
            "SELECT (SELECT COALESCE(MAX(seq), 0) FROM events),"
            " (SELECT COALESCE(MAX(seq), 0) FROM commands)"
        )
        for found, statement, since in (
            (self.kinds, "SELECT DISTINCT kind FROM events WHERE seq > ?", self._events),
            (self.kinds, "SELECT DISTINCT kind FROM commands WHERE seq > ?", self._commands),
            (self.instances, _JOINED, self._events),
        ):
            found.update(name for (name,) in self.reader.query(statement, since))
        self._events, self._commands = events, commands


__all__ = ["Batch", "Filled", "Lane", "LogNames", "Timeline"]
