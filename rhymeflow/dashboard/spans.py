"""What instances and the learner were doing when, as a fold over the log.

An instance is there from `InstanceJoined` to `InstanceLeft`. It generates while it has a response,
waits while it has none but the environment of one that took its last turn there is asked, pulls
from the command to `Pulled` and evaluates from the command to `Evaluated`. The learner trains from
`Train` to `VersionPublished`, and before that from `Accumulate` to `Accumulated` or to `Train`.
Environments answer while any is asked. How long an instance prefilled is known from one report of
it to the next, a quarter of a second later: the span is as long as that, and begins with the
earlier report. Spans of one lane and kind do not overlap and come in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

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
_LEAVES = ("TrajectoryFinished", "TrajectoryInterrupted", "TurnEnded")
_ANSWERS = ("Observed", "EpisodeEnded", "EnvironmentFailed")
_MORE = ("Route", "Abort", "CloseEnvironments", "InstanceLeft", "Snapshot")
KINDS = {*_BEGINS, *_ENDS, *_LEAVES, *_ANSWERS, *_MORE}
"""Of events and commands that tell anything about spans; of others their time alone counts."""


class Span(NamedTuple):
    """Something that went on in a lane from `start` to `end`, seconds of the run."""

    lane: str
    kind: str
    start: float
    end: float
    version: int | None
    """Of the weights: trained to, pulled, evaluated."""


class Fold:
    """Takes in the log line by line; `ended` has the spans that are complete."""

    def __init__(self) -> None:
        self.ended: list[Span] = []
        self.time = 0.0
        """Of the last event."""
        self._open: dict[tuple[str, str], tuple[float, int | None]] = {}
        self._responses: dict[str, set[tuple[int, int]]] = {}
        self._asked: dict[tuple[int, int], str] = {}
        """Responses whose environments are asked, with the instance of their last turn."""
        self._num_asked: Counter[str] = Counter()
        self._prefilled: dict[str, tuple[float, float]] = {}
        """When each instance reported last, and how long it had prefilled."""

    def open(self) -> list[Span]:
        """What goes on, as if it ended with the last event."""
        return [
            Span(lane, _SHOWN.get(kind, kind), start, self.time, version)
            for (lane, kind), (start, version) in self._open.items()
        ]

    def take(self, time: float, kind: str, body: dict[str, Any]) -> None:
        """The time, kind and fields of an event or a command; they come in order."""
        self.time = time
        instance = body.get("instance", LEARNER)
        if kind in _BEGINS:
            self._begin(instance, _BEGINS[kind], body["version"] + (instance == LEARNER))
            if kind == "Train":
                self._end(LEARNER, "accumulating")  # of which it may be told afterwards
            elif kind == "InstanceJoined":
                self._prefilled[instance] = self.time, 0.0
        elif kind in _ENDS:
            self._end(instance, _ENDS[kind])
        elif kind == "Snapshot":
            self._prefill(instance, body.get("prefill_seconds", 0.0))
        elif kind == "InstanceLeft":
            self._responses.pop(instance, None)
            self._prefilled.pop(instance, None)
            for lane, open_kind in list(self._open):
                if lane == instance:
                    self._end(lane, open_kind)
        elif kind in KINDS:
            responses = body["trajectories"] if "trajectories" in body else [body["trajectory"]]
            if responses and responses[0][0] >= 0:  # else of a suite: an evaluation is one span
                self._of_responses(kind, instance, responses, body.get("version"))

    def _of_responses(
        self, kind: str, instance: str, responses: list[list[int]], version: int | None
    ) -> None:
        if kind == "Route":
            if not self._responses.setdefault(instance, set()):
                self._begin(instance, "generating", version)
            self._responses[instance].update((group, member) for group, member in responses)
            self._end(instance, "waiting")
        elif kind in _ANSWERS or kind == "CloseEnvironments":
            self._answered(responses)
        else:
            if kind == "TurnEnded":
                self._ask(responses, instance)
            self._leave(instance, responses)

    def _leave(self, instance: str, trajectories: list[list[int]]) -> None:
        found = self._responses.get(instance)
        if found:
            found.difference_update((group, member) for group, member in trajectories)
            if not found:
                self._end(instance, "generating")
                if self._num_asked[instance]:
                    self._begin(instance, "waiting", None)

    def _ask(self, trajectories: list[list[int]], instance: str) -> None:
        for group, member in trajectories:
            if (group, member) not in self._asked:  # it may be reported twice
                self._asked[group, member] = instance
                self._num_asked[instance] += 1
        self._begin(ENVIRONMENTS, "answering", None)

    def _answered(self, trajectories: list[list[int]]) -> None:
        for group, member in trajectories:
            instance = self._asked.pop((group, member), None)
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
            self.ended.append(Span(instance, "prefill", since, end, None))
        self._prefilled[instance] = self.time, seconds

    def _begin(self, lane: str, kind: str, version: int | None) -> None:
        """It goes on already, if two were asked for and the first is not done."""
        self._open.setdefault((lane, kind), (self.time, version))

    def _end(self, lane: str, kind: str) -> None:
        if (found := self._open.pop((lane, kind), None)) is not None:
            start, version = found
            self.ended.append(Span(lane, _SHOWN.get(kind, kind), start, self.time, version))


Interval = tuple[float, float]


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """What is in at least one of these: intervals that do not touch, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > start:
            found.append((start, end))
    return found


__all__ = ["ENVIRONMENTS", "KINDS", "LEARNER", "Fold", "Interval", "Span", "joined"]
