"""The view of time: lanes of the learner and of each instance, how the batches filled, and what
limits the run.

A lane has at most `PARTS` parts; where more went on, a part is a stretch of time with the share of
it that each kind took.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rhymeflow.dashboard.run import Run
from rhymeflow.dashboard.timeline import ENVIRONMENTS, LEARNER, Filling, Lane, Timeline
from rhymeflow.errors import UserError
from rhymeflow.observe import query
from rhymeflow.observe.limits import of_rows

PARTS = 400
"""Of a lane, in one answer."""
BATCHES = 8
"""The newest that were filled in the time that is asked for."""
POINTS = 100
"""In time, at which the filling of a batch is told."""
READING_SECONDS = 0.25
"""Of the log, within one answer; the page asks again for what is left."""
_ROWS = 1_000
"""Of metrics, the last ones, from which what limits the run is found."""

Window: TypeAlias = Mapping[tuple[str, str], Lane]
"""By lane and kind, spans that reach into some time."""


def found(run: Run, start: float | None = None, end: float | None = None) -> dict[str, Any]:
    """Lanes from `start` to `end`, seconds of the run; None: its beginning and its end. `read` is
    the share of the log that was read so far, which the answer is of.

    Raises:
        UserError: the end is not after the start.
    """
    with run.kept(Timeline) as timeline:
        read = timeline.follow(READING_SECONDS)
        _, last = timeline.reader.last_event()
        begin, stop = start or 0.0, last if end is None else min(end, last)
        if stop <= begin and last:
            raise UserError(f"nothing lies between {begin:g} and {stop:g} seconds of this run")
        return {
            "start": begin,
            "end": stop,
            "last": last,
            "read": read,
            "lanes": lanes(timeline.spans.within(begin, stop), begin, stop),
            "batches": batches(timeline.filling, begin, stop),
            "limits": _latest(run, timeline),
        }


def batches(filling: Filling, start: float, end: float) -> list[dict[str, Any]]:
    """Of each batch, the oldest first and last what is in none yet: how many of its groups had
    begun and how many were complete, at `POINTS` times of the window until it was trained on."""
    edges = np.linspace(start, end, POINTS)
    found: list[dict[str, Any]] = []
    for batch in reversed(filling.batches):
        if batch.trained < start or len(found) == BATCHES:
            break
        began, complete = zip(*batch.groups, strict=True)
        if min(began) > end:
            continue
        until = edges[edges < batch.trained]
        found.append(
            {
                "version": batch.version,
                "size": len(batch.groups),
                "trained": batch.trained,
                "begun": _counts(began, until),
                "complete": _counts(complete, until),
            }
        )
    found.reverse()
    if waiting := filling.open():
        found.append({"version": None, "begun": _counts(waiting, edges)})
    return found


def _counts(times: Sequence[float], edges: NDArray[np.float64]) -> list[int]:
    """How many of these times are not after each edge."""
    found: list[int] = np.searchsorted(np.sort(times), edges, "right").tolist()
    return found


def lanes(window: Window, start: float, end: float) -> list[dict[str, Any]]:
    """By lane, the learner first: its spans, or of too many the shares of `PARTS` parts."""
    by_name: dict[str, dict[str, Lane]] = {}
    for (name, kind), lane in window.items():
        by_name.setdefault(name, {})[kind] = lane
    names = sorted(
        by_name, key=lambda name: (name != LEARNER, name == ENVIRONMENTS, _natural(name))
    )
    return [{"name": name, **_lane(by_name[name], start, end)} for name in names]


def _lane(kinds: Mapping[str, Lane], start: float, end: float) -> dict[str, Any]:
    if sum(map(len, kinds.values())) > PARTS:
        edges = np.linspace(start, end, PARTS + 1)
        return {"shares": {kind: shares(kinds[kind], edges).round(4).tolist() for kind in kinds}}
    spans = [
        [kind, begin, until, None if version < 0 else version]
        for kind, lane in kinds.items()
        for begin, until, version in zip(lane.starts, lane.ends, lane.versions, strict=True)
    ]
    return {"spans": sorted(spans, key=lambda span: span[1])}


def shares(lane: Lane, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """[parts], the share of each part between two `edges` that the lane's spans cover."""
    starts, ends = np.array(lane.starts), np.array(lane.ends)
    # Time covered until each edge: all of the spans that have ended, and of the one that has not
    # what has passed.
    lengths = np.concatenate([[0.0], np.cumsum(ends - starts)])
    begun = np.searchsorted(starts, edges, "right")
    last = np.maximum(begun - 1, 0)
    covered = lengths[begun] - np.where(begun > 0, np.maximum(ends[last] - edges, 0.0), 0.0)
    parts: NDArray[np.float64] = np.diff(covered) / np.diff(edges)
    return parts


def _latest(run: Run, timeline: Timeline) -> dict[str, Any] | None:
    """What limits the run, in the terminal's words, and the shares of those steps' time; None
    before the first."""
    rows = [row for row in run.metrics.rows()[-_ROWS:] if row.get("step_time")]
    attempts = timeline.reader.attempts()
    limit = of_rows(rows, query.bound(json.loads(attempts[-1].config))) if attempts else None
    if limit is None:
        return None
    end = rows[-1]["time"]
    start = end - sum(row["step_time"] for row in rows[-limit.steps :])
    window = timeline.spans.within(start, end)
    return {"line": limit.line, "steps": limit.steps, **limits(window, start, end)}


def limits(window: Window, start: float, end: float) -> dict[str, float]:
    """Shares of the time from `start` to `end` in which there are instances, a mean over them:
    `both` work, the `learner` alone (the instance has nothing to generate that the bound allows, or
    pulls), the `instances` alone (the learner waits for them), no one because the instance waits
    for `environments`, `neither` for another reason."""
    ends = [np.array([*lane.starts, *lane.ends]) for lane in window.values()]
    edges = np.unique(np.clip(np.concatenate([[start, end], *ends]), start, end))
    lengths, middles = np.diff(edges), (edges[1:] + edges[:-1]) / 2

    def during(name: str, *kinds: str) -> NDArray[np.bool_]:
        """Between which edges one of these goes on."""
        found = np.zeros(len(middles), bool)
        for lane in (window[name, kind] for kind in kinds if (name, kind) in window):
            begun = np.searchsorted(lane.starts, middles)
            found |= begun > np.searchsorted(lane.ends, middles)
        return found

    training = during(LEARNER, "training")
    seconds = dict.fromkeys(("both", "learner", "instances", "environments"), 0.0)
    total = 0.0
    for name in sorted({name for name, _ in window if name != LEARNER}):
        there = during(name, "there")
        works, trains = there & during(name, "generating", "evaluation"), there & training
        total += float(lengths[there].sum())
        for what, when in (
            ("both", works & trains),
            ("learner", trains & ~works),
            ("instances", works & ~trains),
            ("environments", during(name, "waiting") & ~works & ~trains),
        ):
            seconds[what] += float(lengths[when].sum())
    found = {name: each / (total or 1.0) for name, each in seconds.items()}
    return {**found, "neither": max(1.0 - sum(found.values()), 0.0)}


def _natural(name: str) -> tuple[object, ...]:
    """`rollout-2` before `rollout-10`, and its successor `rollout-2.1` after it."""
    return tuple(int(each) if each.isdecimal() else 0 for each in name.replace(".", "-").split("-"))
