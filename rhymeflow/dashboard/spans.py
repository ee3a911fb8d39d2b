"""What instances and the learner were doing when, as a fold over the log.

An instance is there from `InstanceJoined` to `InstanceLeft`. It generates while it has a response,
pulls from the command to `Pulled` and evaluates from the command to `Evaluated`. The learner trains
from `Train` to `VersionPublished`. What a response waits for between turns is nobody's span.

Holds true: spans of one lane and kind do not overlap and come in order; the state between two parts
of the log can be written down and read again. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

LEARNER = "learner"


_BEGINS = {
    "Train": "training",
    "InstanceJoined": "there",
    "Pull": "pull",
    "Evaluate": "evaluation",
}
_ENDS = {"VersionPublished": "training", "Pulled": "pull", "Evaluated": "evaluation"}
_LEAVES = ("TrajectoryFinished", "TrajectoryInterrupted", "TurnEnded")
KINDS = {*_BEGINS, *_ENDS, *_LEAVES, "Route", "Abort", "InstanceLeft"}
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

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        """Begin, or go on from `state`."""
        state = state or {"open": [], "responses": {}, "time": 0.0}
        self.ended: list[Span] = []
        self.time: float = state["time"]
        """Of the last event."""
        self._open: dict[tuple[str, str], tuple[float, int | None]] = {
            (lane, kind): (start, version) for lane, kind, start, version in state["open"]
        }
        self._responses: dict[str, set[tuple[int, int]]] = {
            name: {(group, member) for group, member in found}
            for name, found in state["responses"].items()
        }

    def state(self) -> dict[str, Any]:
        """What `__init__` takes, made of JSON's types."""
        return {
            "time": self.time,
            "open": [[*key, *value] for key, value in self._open.items()],
            "responses": {name: sorted(found) for name, found in self._responses.items()},
        }

    def open(self) -> list[Span]:
        """What goes on, as if it ended with the last event."""
        return [
            Span(lane, kind, start, self.time, version)
            for (lane, kind), (start, version) in self._open.items()
        ]

    def take(self, lines: Iterable[tuple[float, str, dict[str, Any]]]) -> None:
        """The time, kind and fields of events and commands, in order."""
        for time, kind, body in lines:
            self.time = time
            self._take(kind, body)

    def _take(self, kind: str, body: dict[str, Any]) -> None:
        instance = body.get("instance", LEARNER)
        if kind in _BEGINS:
            self._begin(instance, _BEGINS[kind], body["version"] + (kind == "Train"))
        elif kind in _ENDS:
            self._end(instance, _ENDS[kind])
        elif kind == "Route":
            if not self._responses.setdefault(instance, set()):
                self._begin(instance, "generating", body["version"])
            self._responses[instance].add(tuple(body["trajectory"]))
        elif kind in _LEAVES:
            self._leave(instance, [body["trajectory"]])
        elif kind == "Abort":
            self._leave(instance, body["trajectories"])
        elif kind == "InstanceLeft":
            self._responses.pop(instance, None)
            for lane, open_kind in list(self._open):
                if lane == instance:
                    self._end(lane, open_kind)

    def _leave(self, instance: str, trajectories: list[list[int]]) -> None:
        found = self._responses.get(instance)
        if found:
            found.difference_update((group, member) for group, member in trajectories)
            if not found:
                self._end(instance, "generating")

    def _begin(self, lane: str, kind: str, version: int | None) -> None:
        """It goes on already, if two were asked for and the first is not done."""
        self._open.setdefault((lane, kind), (self.time, version))

    def _end(self, lane: str, kind: str) -> None:
        if (found := self._open.pop((lane, kind), None)) is not None:
            start, version = found
            self.ended.append(Span(lane, kind, start, self.time, version))


__all__ = ["KINDS", "LEARNER", "Fold", "Span"]
