"""What went on when in a run, and how its batches filled: folds over its log, kept in memory."""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from typing import NamedTuple

import msgspec

from rhymeflow.store.reader import TrajectoryReader

EVENTS_AT_ONCE = 5_000
LEARNER, ENVIRONMENTS = "learner", "environments"
"""Lanes besides those of instances."""

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
_SHOWN = {"accumulating": "training"}
"""Kinds that go by another's name once they are spans."""
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


class Body(msgspec.Struct):
    """Fields of events and commands that say what goes on."""

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
        """Add a span that ended after all others. `version`: of the weights that were trained to,
        pulled or evaluated; stored as -1 where there is none."""
        self.starts.append(start)
        self.ends.append(end)
        self.versions.append(-1 if version is None else version)

    def between(self, start: float, stop: float) -> Lane:
        """The spans that overlap this time."""
        those = slice(bisect_left(self.ends, start), bisect_right(self.starts, stop))
        found = Lane()
        found.starts, found.ends = self.starts[those], self.ends[those]
        found.versions = self.versions[those]
        return found

    def __len__(self) -> int:
        return len(self.starts)


class Fold:
    """Takes in the log line by line; `lanes` has the spans that have ended, by lane and kind.

    An instance generates while it has a response, and waits while it has none but the environment
    of one whose last turn it generated is asked. How long it prefilled is known from one report of
    it to the next, a quarter of a second later: the span begins with the earlier report.
    """

    def __init__(self) -> None:
        self.lanes: dict[tuple[str, str], Lane] = {}
        self.time = 0.0
        """Of the last event."""
        self._open: dict[tuple[str, str], tuple[float, int | None]] = {}
        self._responses: dict[str, set[Response]] = {}
        self._asked: dict[Response, str] = {}
        """Responses whose environments are asked, with the instance of their last turn."""
        self._num_asked: Counter[str] = Counter()
        self._prefilled: dict[str, tuple[float, float]] = {}
        """When each instance reported last, and how long it had prefilled."""

    def within(self, start: float, stop: float) -> dict[tuple[str, str], Lane]:
        """By lane and kind, the spans that overlap this time; those that are open end with the last
        event."""
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
            if kind == "Train":
                self._end(LEARNER, "accumulating")  # the log may say so only later
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
        """Of two that were asked for, the second begins when the first does."""
        self._open.setdefault((lane, kind), (self.time, version))

    def _end(self, lane: str, kind: str) -> None:
        if (found := self._open.pop((lane, kind), None)) is not None:
            start, version = found
            self._put(lane, _SHOWN.get(kind, kind), start, self.time, version)

    def _put(self, lane: str, kind: str, start: float, end: float, version: int | None) -> None:
        self.lanes.setdefault((lane, kind), Lane()).put(start, end, version)


class Batch(NamedTuple):
    """A batch that was trained on, and when."""

    version: int
    trained: float
    groups: list[tuple[float, float]]
    """When each of its groups began, and when it was complete, seconds of the run."""


class Filling:
    """Takes in the log line by line; `batches` has what was trained on.

    A group has an entry of a staleness buffer from its first `Route` on, and an occupied one when
    as many of its responses are rewarded as are trained on (StaleFlow, section 4.2). Entries move
    between buffers; here a group belongs to the batch that trained on it.
    """

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self._open: dict[int, list[float]] = {}
        """Of a group that has begun: when, and when each of its rewards came."""

    def open(self) -> list[float]:
        """When the groups began that have not ended."""
        return [times[0] for times in self._open.values()]

    def take(self, now: float, kind: str, body: Body) -> None:
        """The time, kind and fields of an event or a command; they come in order."""
        if kind == "Train":
            self._train(now, body)
        elif kind == "Drop" and body.group is not None:
            self._open.pop(body.group, None)
        elif kind in ("Route", "TrajectoryRewarded") and body.trajectory is not None:
            group, _ = body.trajectory
            if kind == "Route" and group >= 0:  # those below are of suites
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


class Timeline:
    """Folds of the log as far as it was read; `follow` reads on."""

    def __init__(self, reader: TrajectoryReader) -> None:
        self.reader = reader
        self.spans, self.filling = Fold(), Filling()
        self._done = 0

    def follow(self, seconds: float) -> float:
        """Read on in the log, for about `seconds`; return the share of it that has been read."""
        until = time.monotonic() + seconds
        last, _ = self.reader.last_event()
        while self._done < last:
            self._take(min(self._done + EVENTS_AT_ONCE, last))
            if time.monotonic() >= until:
                break
        return self._done / last if last else 1.0

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
