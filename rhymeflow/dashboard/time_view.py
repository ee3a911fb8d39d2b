"""The view of time: lanes of the learner and of each instance, the filling of batches, and what
limits the run. They are computed from the log and kept in memory.

A lane in a response has at most `PARTS` parts; if it has more spans, a part is a stretch of time
with the share of each kind."""

from __future__ import annotations

import json
import time
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from rhymeflow.dashboard.run import Run
from rhymeflow.errors import UserError
from rhymeflow.observe import query
from rhymeflow.observe.limits import of_rows
from rhymeflow.store.reader import TrajectoryReader

PARTS = 400  # most parts of a lane in a response
BATCHES = 8  # most batches in a response: the newest that filled in its time
POINTS = 100  # number of points of a batch's filling
READING_SECONDS = 0.25  # time for reading the log in one request; the page asks again for the rest
EVENTS_AT_ONCE = 5_000
LEARNER, ENVIRONMENTS = "learner", "environments"  # lanes besides those of instances

_BEGINS = {
    "Accumulate": "accumulating",
    "Train": "training",
    "InstanceJoined": "there",
    "Pull": "pull",
    "Evaluate": "evaluation",
}
_ENDS = {
    "Accumulated": "accumulating",
    "VersionPublished": "training",
    "Pulled": "pull",
    "Evaluated": "evaluation",
}
_OVER = {"Train": "accumulating", "Accumulate": "training"}
"""What is over with a command to the learner, which the log may say only later: a version can still
be on its way into the weight store."""
_SHOWN = {"accumulating": "training"}  # kinds whose spans are shown as another kind
_LEAVES = ("TrajectoryFinished", "TrajectoryInterrupted", "TurnEnded", "Abort")
_ANSWERS = ("Observed", "EpisodeEnded", "EnvironmentFailed", "CloseEnvironments")
_OTHERS = ("Route", "InstanceLeft", "Snapshot", "TrajectoryRewarded", "Drop")
_KINDS = ", ".join(f"'{kind}'" for kind in (*_BEGINS, *_ENDS, *_LEAVES, *_ANSWERS, *_OTHERS))
_LINES = f"""
SELECT time, kind, body FROM (
    SELECT seq AS event, 0 AS is_command, seq AS number, time, kind, body FROM events
        WHERE seq BETWEEN ?1 AND ?2 AND kind IN ({_KINDS})
    UNION ALL SELECT c.event, 1, c.seq, e.time, c.kind, c.body
        FROM commands c JOIN events e ON e.seq = c.event
        WHERE c.seq > ?3 AND c.seq <= ?4 AND c.kind IN ({_KINDS}))
ORDER BY event, is_command, number"""

Response = tuple[int, int]
Window: TypeAlias = "Mapping[tuple[str, str], Lane]"
"""Spans that overlap some time, by lane and kind."""


class Body(msgspec.Struct):
    """Fields of events and commands that this view uses."""

    instance: str = LEARNER
    version: int | None = None
    trajectory: Response | None = None
    trajectories: list[Response] | None = None
    group: int | None = None
    groups: list[int] = []
    members: list[list[int]] = []
    prefill_seconds: float = 0.0


class Lane:
    """Spans of one lane and kind, in order; none begins before another has ended."""

    def __init__(self) -> None:
        self.starts, self.ends, self.versions = array("d"), array("d"), array("q")

    def put(self, start: float, end: float, version: int | None) -> None:
        """Add a span that ended after all others. `version` is that of the weights that were
        trained, pulled or evaluated; None is stored as -1."""
        self.starts.append(start)
        self.ends.append(end)
        self.versions.append(-1 if version is None else version)

    def between(self, start: float, stop: float) -> Lane:
        """Return the spans that overlap this time."""
        part = slice(bisect_left(self.ends, start), bisect_right(self.starts, stop))
        lane = Lane()
        lane.starts, lane.ends = self.starts[part], self.ends[part]
        lane.versions = self.versions[part]
        return lane

    def __len__(self) -> int:
        return len(self.starts)


class Fold:
    """Reads the log row by row; `lanes` has the spans that have ended, by lane and kind.

    An instance generates while it has a response. It waits while it has none, but an environment is
    to answer a turn that it generated. Its reports, a quarter of a second apart, say how long it
    prefilled between them: the span begins with the earlier report."""

    def __init__(self) -> None:
        self.lanes: dict[tuple[str, str], Lane] = {}
        self.time = 0.0  # time of the last event
        self._open: dict[tuple[str, str], tuple[float, int | None]] = {}
        self._responses: dict[str, set[Response]] = {}
        self._asked: dict[Response, str] = {}
        """Responses that wait for an environment, with the instance of their last turn."""
        self._num_asked: Counter[str] = Counter()
        self._prefilled: dict[str, tuple[float, float]] = {}
        """Time of each instance's last report, and its seconds of prefilling up to then."""

    def within(self, start: float, stop: float) -> dict[tuple[str, str], Lane]:
        """Return the spans that overlap this time, by lane and kind; open ones end now."""
        parts = {key: lane.between(start, stop) for key, lane in self.lanes.items()}
        found = {key: part for key, part in parts.items() if part}
        for (name, kind), (begun, version) in self._open.items():
            if begun <= stop and self.time >= start:
                lane = found.setdefault((name, _SHOWN.get(kind, kind)), Lane())
                lane.put(begun, self.time, version)
        return found

    def take(self, time: float, kind: str, body: Body) -> None:
        """The time, kind and fields of an event or a command; they come in order."""
        self.time = time
        instance = body.instance
        if kind == "Route" or kind in _LEAVES or kind in _ANSWERS:
            some = body.trajectories
            if some is None:
                some = [body.trajectory] if body.trajectory is not None else []
            if some and some[0][0] >= 0:  # else of a suite: an evaluation is one span
                self._of_responses(kind, instance, some, body.version)
        elif kind in _BEGINS:
            assert body.version is not None
            self._begin(instance, _BEGINS[kind], body.version + (instance == LEARNER))
            if kind in _OVER:
                self._end(LEARNER, _OVER[kind])
            elif kind == "InstanceJoined":
                self._prefilled[instance] = time, 0.0
        elif kind in _ENDS:
            self._end(instance, _ENDS[kind])
        elif kind == "Snapshot":
            self._prefill(instance, body.prefill_seconds)
        elif kind == "InstanceLeft":
            self._responses.pop(instance, None)
            self._prefilled.pop(instance, None)
            for lane, open_kind in list(self._open):
                if lane == instance:
                    self._end(lane, open_kind)

    def _of_responses(
        self, kind: str, instance: str, responses: list[Response], version: int | None
    ) -> None:
        if kind == "Route":
            there = self._responses.setdefault(instance, set())
            if not there:
                self._begin(instance, "generating", version)
            there.update(responses)
            self._end(instance, "waiting")
        elif kind in _ANSWERS:
            self._answered(responses)
        else:
            if kind == "TurnEnded":
                self._ask(responses, instance)
            self._leave(instance, responses)

    def _leave(self, instance: str, responses: list[Response]) -> None:
        found = self._responses.get(instance)
        if found:
            found.difference_update(responses)
            if not found:
                self._end(instance, "generating")
                if self._num_asked[instance]:
                    self._begin(instance, "waiting", None)

    def _ask(self, responses: list[Response], instance: str) -> None:
        for response in responses:
            if response not in self._asked:  # it may be reported twice
                self._asked[response] = instance
                self._num_asked[instance] += 1
        self._begin(ENVIRONMENTS, "answering", None)

    def _answered(self, responses: list[Response]) -> None:
        for response in responses:
            instance = self._asked.pop(response, None)
            if instance is None:
                continue
            self._num_asked[instance] -= 1
            if not self._num_asked[instance]:
                del self._num_asked[instance]
                self._end(instance, "waiting")
        if not self._asked:
            self._end(ENVIRONMENTS, "answering")

    def _prefill(self, instance: str, seconds: float) -> None:
        since, before = self._prefilled.get(instance, (self.time, 0.0))
        end = min(since + seconds - before, self.time)
        if end > since:
            self._put(instance, "prefill", since, end, None)
        self._prefilled[instance] = self.time, seconds

    def _begin(self, lane: str, kind: str, version: int | None) -> None:
        """Begin a span, unless one of this lane and kind is open."""
        self._open.setdefault((lane, kind), (self.time, version))

    def _end(self, lane: str, kind: str) -> None:
        if (found := self._open.pop((lane, kind), None)) is not None:
            start, version = found
            self._put(lane, _SHOWN.get(kind, kind), start, self.time, version)

    def _put(self, lane: str, kind: str, start: float, end: float, version: int | None) -> None:
        self.lanes.setdefault((lane, kind), Lane()).put(start, end, version)


class Batch(NamedTuple):
    """A batch, and the time when it was trained on."""

    version: int
    trained: float
    groups: list[tuple[float, float]]
    """When each of its groups began and was complete, in seconds of the run."""


class Filling:
    """Reads the log row by row; `batches` has the batches that were trained on.

    A group has an entry of a staleness buffer from its first `Route` on, and an occupied one when
    as many of its responses are rewarded as are trained on (StaleFlow, section 4.2). Entries move
    between buffers; here a group belongs to the batch that trained on it."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self._open: dict[int, list[float]] = {}
        """For each group in progress, when it began and when each of its rewards came."""

    def open(self) -> list[float]:
        """Return when each group in progress began."""
        return [times[0] for times in self._open.values()]

    def take(self, now: float, kind: str, body: Body) -> None:
        """The time, kind and fields of an event or a command; they come in order."""
        if kind == "Train":
            self._train(now, body)
        elif kind == "Drop" and body.group is not None:
            self._open.pop(body.group, None)
        elif kind in ("Route", "TrajectoryRewarded") and body.trajectory is not None:
            group, _ = body.trajectory
            if kind == "Route" and group >= 0:  # suites have numbers below 0
                self._open.setdefault(group, [now])
            elif (found := self._open.get(group)) is not None:
                found.append(now)

    def _train(self, now: float, body: Body) -> None:
        assert body.version is not None
        groups = []
        for group, members in zip(body.groups, body.members, strict=False):
            began, *rewards = self._open.pop(group, [0.0])
            if 0 < len(members) <= len(rewards):  # else the log has no such group
                groups.append((began, rewards[len(members) - 1]))
        if groups:
            self.batches.append(Batch(body.version, now, groups))


class RunTimeline:
    """Spans and batches of the log as far as it was read."""

    def __init__(self, reader: TrajectoryReader) -> None:
        self.reader = reader
        self.spans, self.filling = Fold(), Filling()
        self._done = 0
        self.read = 1.0  # share of the log that was read

    def follow(self) -> None:
        """Continue reading the log, for about `READING_SECONDS`."""
        until = time.monotonic() + READING_SECONDS
        last, _ = self.reader.last_event()
        while self._done < last:
            self._take(min(self._done + EVENTS_AT_ONCE, last))
            if time.monotonic() >= until:
                break
        self.read = self._done / last if last else 1.0

    def _take(self, last: int) -> None:
        commands = [self.reader.last_command_upto(each) for each in (self._done, last)]
        decode = msgspec.json.Decoder(Body).decode
        # Each line is dropped before the next is read: the garbage collector looks at all objects
        # of the process each time that many more have come.
        for now, kind, text in self.reader.query(_LINES, self._done + 1, last, *commands):
            body = decode(text)
            self.spans.take(now, kind, body)
            self.filling.take(now, kind, body)
        ((self.spans.time,),) = self.reader.query("SELECT time FROM events WHERE seq = ?", last)
        self._done = last


# -- the view --------------------------------------------------------------------------------------


def found(run: Run, start: float | None = None, end: float | None = None) -> dict[str, Any]:
    """Lanes from `start` to `end`, seconds of the run; None: its beginning and its end. The answer
    covers `read`, the share of the log that was read so far. Raises `UserError` if the end is not
    after the start."""
    with run.kept(RunTimeline) as timeline:
        _, last = timeline.reader.last_event()
        begin, stop = start or 0.0, last if end is None else min(end, last)
        if stop <= begin and last:
            raise UserError(f"nothing lies between {begin:g} and {stop:g} seconds of this run")
        return {
            "start": begin,
            "end": stop,
            "last": last,
            "read": timeline.read,
            "lanes": lanes(timeline.spans.within(begin, stop), begin, stop),
            "batches": batches(timeline.filling, begin, stop),
            "limits": _latest(run, timeline),
        }


def batches(filling: Filling, start: float, end: float) -> list[dict[str, Any]]:
    """Return for each batch, oldest first, how many of its groups had begun and were complete at
    `POINTS` times until it was trained on. The last entry is of groups without a batch yet."""
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
    return np.searchsorted(np.sort(times), edges, "right").tolist()


def lanes(window: Window, start: float, end: float) -> list[dict[str, Any]]:
    """By lane, the learner first: its spans, or if they are many the shares of `PARTS` parts."""
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
    # Time covered until each edge: spans that began before it, less what of the last lies after.
    lengths = np.concatenate([[0.0], np.cumsum(ends - starts)])
    begun = np.searchsorted(starts, edges, "right")
    last = np.maximum(begun - 1, 0)
    covered = lengths[begun] - np.where(begun > 0, np.maximum(ends[last] - edges, 0.0), 0.0)
    return np.diff(covered) / np.diff(edges)


def _latest(run: Run, timeline: RunTimeline) -> dict[str, Any] | None:
    """Return the run's limit in the terminal's words and the shares of time, None at first."""
    rows = [row for row in run.metrics.rows() if row.get("step_time")]
    attempts = timeline.reader.attempts()
    limit = of_rows(rows, query.bound(json.loads(attempts[-1].config))) if attempts else None
    if limit is None:
        return None
    end = rows[-1]["time"]
    start = end - sum(row["step_time"] for row in rows[-limit.steps :])
    window = timeline.spans.within(start, end)
    return {"line": limit.line, "steps": limit.steps, **limits(window, start, end)}


def limits(window: Window, start: float, end: float) -> dict[str, float]:
    """Shares of the time from `start` to `end` in which instances exist, as a mean over them:
    `both` work; only the `learner` (the bound lets the instance generate nothing, or it pulls);
    only the `instances` (the learner waits for them); none, because the instance waits for
    `environments`; `neither`, for another reason."""
    ends = [np.array([*lane.starts, *lane.ends]) for lane in window.values()]
    edges = np.unique(np.clip(np.concatenate([[start, end], *ends]), start, end))
    lengths, middles = np.diff(edges), (edges[1:] + edges[:-1]) / 2

    def during(name: str, *kinds: str) -> NDArray[np.bool_]:
        """Whether one of these kinds is on, between each pair of edges."""
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
