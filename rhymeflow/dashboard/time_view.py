"""The view of time: lanes of the learner and of each instance, how the batches filled, and what
limits the run.

Holds true: a lane has at most `PARTS` parts; where more went on, a part is a stretch of time with
the share of it that each kind took. The five shares of what limits a run add up to 1. Of the
batches at most the `BATCHES` newest that were filled in the time are said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rhymeflow.dashboard import side_log, side_spans
from rhymeflow.dashboard.filling import counts
from rhymeflow.dashboard.run import Run
from rhymeflow.dashboard.spans import ENVIRONMENTS, LEARNER, Interval, Span, joined
from rhymeflow.errors import UserError
from rhymeflow.observe.limits import of_rows
from rhymeflow.store.reader import TrajectoryReader

PARTS = 400
"""Of a lane, in one answer."""
BATCHES = 8
POINTS = 100
"""In time, at which the filling of a batch is told."""
_ROWS = 1_000
"""Of metrics, the last ones, from which what limits the run is found."""
_OF_STEPS = ("time", "step_time", "idle/rollout", "idle/learner", "staleness/max")


def found(run: Run, start: float | None = None, end: float | None = None) -> dict[str, Any]:
    """Lanes from `start` to `end`, seconds of the run; None: its beginning and its end.

    Raises:
        UserError: the end is not after the start.
    """
    with run.reader() as reader:
        _, last = side_log.last_event(reader)
        begin, stop = start or 0.0, last if end is None else min(end, last)
        if stop <= begin and last:
            raise UserError(f"nothing lies between {begin:g} and {stop:g} seconds of this run")
        spans, many = side_spans.bounded(reader, begin, stop, PARTS)
        going_on = side_log.fold(reader).open()
        latest = _latest(run, reader, going_on)
        batches = _batches(reader, begin, stop)
    spans += [each for each in going_on if each.start <= stop and each.end >= begin]
    return {
        "start": begin,
        "end": stop,
        "last": last,
        "lanes": lanes(spans, begin, stop, many),
        "batches": batches,
        "limits": latest,
    }


def _batches(reader: TrajectoryReader, start: float, end: float) -> list[dict[str, Any]]:
    """Of each batch, the oldest first and last what is in none yet: how many of its groups had
    begun and how many were complete, at `POINTS` times of the window until it was trained on."""
    edges = np.linspace(start, end, POINTS)
    versions = reader.query(
        "SELECT version, MIN(trained) FROM side.filling WHERE trained >= ? GROUP BY version"
        " HAVING MIN(began) <= ? ORDER BY version DESC LIMIT ?",
        start,
        end,
        BATCHES,
    )
    found = []
    for version, trained in reversed(versions):
        groups = reader.query("SELECT began, complete FROM side.filling WHERE version = ?", version)
        until = edges[edges < trained]
        began, complete = zip(*groups, strict=True)
        found.append(
            {
                "version": version,
                "size": len(groups),
                "trained": trained,
                "begun": counts(began, until),
                "complete": counts(complete, until),
            }
        )
    waiting = side_log.groups(reader).open()
    if waiting:
        found.append({"version": None, "begun": counts(waiting, edges)})
    return found


def lanes(
    spans: Sequence[Span], start: float, end: float, many: side_spans.Shares | None = None
) -> list[dict[str, Any]]:
    """By lane, the learner first: its spans, or of too many the shares of `PARTS` parts. `many`:
    shares of lanes whose spans are not given, but for those that go on."""
    many = many or {}
    by_lane: dict[str, list[Span]] = {name: [] for name in many}
    for span in spans:
        by_lane.setdefault(span.lane, []).append(span)
    names = sorted(
        by_lane, key=lambda name: (name != LEARNER, name == ENVIRONMENTS, _natural(name))
    )
    return [
        {
            "name": name,
            **_lane(sorted(by_lane[name], key=lambda s: s.start), start, end, many.get(name)),
        }
        for name in names
    ]


def _lane(
    spans: list[Span], start: float, end: float, known: dict[str, NDArray[np.float64]] | None
) -> dict[str, Any]:
    if known is None and len(spans) <= PARTS:
        return {"spans": [[each.kind, each.start, each.end, each.version] for each in spans]}
    edges = np.linspace(start, end, PARTS + 1)
    found = dict(known or {})
    for kind in dict.fromkeys(span.kind for span in spans):
        these = shares([span for span in spans if span.kind == kind], edges)
        found[kind] = found.get(kind, 0.0) + these
    return {"shares": {kind: parts.round(4).tolist() for kind, parts in found.items()}}


def shares(spans: Sequence[Span], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """[parts], the share of each part between two `edges` that is covered by spans, at least one;
    they are in order and do not overlap."""
    starts = np.array([span.start for span in spans])
    ends = np.array([span.end for span in spans])
    # Time covered until each edge: all of the spans that have ended, and of the one that has not
    # what has passed.
    lengths = np.concatenate([[0.0], np.cumsum(ends - starts)])
    begun = np.searchsorted(starts, edges, "right")
    last = np.maximum(begun - 1, 0)
    covered = lengths[begun] - np.where(begun > 0, np.maximum(ends[last] - edges, 0.0), 0.0)
    parts: NDArray[np.float64] = np.diff(covered) / np.diff(edges)
    return parts


def _latest(run: Run, reader: TrajectoryReader, going_on: list[Span]) -> dict[str, Any] | None:
    """What limits the run, in the terminal's words, and the shares of those steps' time; None
    before the first."""
    columns = run.columns(_OF_STEPS).values()
    rows = [dict(zip(_OF_STEPS, each, strict=True)) for each in zip(*columns, strict=True)]
    rows = [row for row in rows[-_ROWS:] if row["step_time"]]
    attempts = reader.attempts()
    limit = of_rows(rows, attempts[-1].config) if attempts else None
    if limit is None:
        return None
    end = rows[-1]["time"]
    start = end - sum(row["step_time"] for row in rows[-limit.steps :])
    spans = side_spans.within(reader, start, end)
    spans += [each for each in going_on if each.start <= end]
    return {"line": limit.line, "steps": limit.steps, **limits(spans, start, end)}


def limits(spans: Sequence[Span], start: float, end: float) -> dict[str, float]:
    """Shares of the time from `start` to `end` in which there are instances, a mean over them:
    `both` work, the `learner` alone (the instance has nothing to generate that the bound allows, or
    pulls), the `instances` alone (the learner waits for them), no one because the instance waits
    for `environments`, `neither` for another reason."""
    training = _clipped(spans, LEARNER, ("training",), start, end)
    total = both = learner = instances = environments = 0.0
    for lane in {span.lane for span in spans if span.lane != LEARNER}:
        there = _clipped(spans, lane, ("there",), start, end)
        busy = _clipped(spans, lane, ("generating", "evaluation"), start, end)
        trains, works = _intersection(training, there), _intersection(busy, there)
        together = _length(_intersection(trains, works))
        total += _length(there)
        both += together
        learner += _length(trains) - together
        instances += _length(works) - together
        waits = _clipped(spans, lane, ("waiting",), start, end)
        either = joined([*trains, *works])
        environments += _length(waits) - _length(_intersection(waits, either))
    scale = total or 1.0
    seconds = {
        "both": both,
        "learner": learner,
        "instances": instances,
        "environments": environments,
    }
    found = {name: each / scale for name, each in seconds.items()}
    return {**found, "neither": max(1.0 - sum(found.values()), 0.0)}


def _clipped(
    spans: Sequence[Span], lane: str, kinds: Sequence[str], start: float, end: float
) -> list[Interval]:
    """The time that these take, within the limits and joined where they overlap."""
    wanted = (span for span in spans if span.lane == lane and span.kind in kinds)
    return joined((max(span.start, start), min(span.end, end)) for span in wanted)


def _intersection(first: list[Interval], second: list[Interval]) -> list[Interval]:
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        low, high = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if low < high:
            found.append((low, high))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(intervals: Sequence[Interval]) -> float:
    return sum(high - low for low, high in intervals)


def _natural(name: str) -> tuple[object, ...]:
    """`rollout-2` before `rollout-10`, and its successor `rollout-2.1` after it."""
    return tuple(int(each) if each.isdecimal() else 0 for each in name.replace(".", "-").split("-"))


__all__ = ["PARTS", "found", "lanes", "limits", "shares"]
