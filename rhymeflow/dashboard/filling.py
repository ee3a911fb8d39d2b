"""How the staleness buffers filled: when each group began, was complete and was trained on, as a
fold over the log.

A group has an entry of a buffer from its first `Route` on (RESERVED), and an occupied one when as
many of its responses are rewarded as are trained on (OCCUPIED; StaleFlow, section 4.2). Entries
move between buffers before their batch is trained; here a group belongs to the batch that trained
on it, and to none before.

Holds true: rows come in the order of batches; what is dropped leaves none; the state between two
parts of the log can be written down and read again. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

KINDS = frozenset({"Route", "TrajectoryRewarded", "Train", "Drop"})
"""Of the lines that change anything."""


class Filled(NamedTuple):
    """A group of a batch; times in seconds of the run."""

    version: int
    """The batch."""
    group: int
    began: float
    complete: float
    trained: float


class Fold:
    """Takes in the log line by line; `ended` has groups that were trained on."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        """Begin, or go on from `state`."""
        self.ended: list[Filled] = []
        self._open: dict[int, list[float]] = {}
        """Of a group that has begun: when, and when each of its rewards came."""
        for group, times in (state or {}).get("open", []):
            self._open[group] = times

    def state(self) -> dict[str, Any]:
        """What `__init__` takes, made of JSON's types."""
        return {"open": list(self._open.items())}

    def open(self) -> list[float]:
        """When the groups began that have not ended."""
        return [times[0] for times in self._open.values()]

    def take(self, lines: Iterable[tuple[float, str, dict[str, Any]]]) -> None:
        """The time, kind and fields of events and commands, in order."""
        for time, kind, body in lines:
            if kind == "Route":
                self._open.setdefault(body["trajectory"][0], [time])
            elif kind == "TrajectoryRewarded":
                if (found := self._open.get(body["trajectory"][0])) is not None:
                    found.append(time)
            elif kind == "Train":
                for group, members in zip(body["groups"], body["members"], strict=False):
                    began, *rewards = self._open.pop(group, [0.0])
                    if 0 < len(members) <= len(rewards):  # else the log has no such group
                        complete = rewards[len(members) - 1]
                        self.ended.append(Filled(body["version"], group, began, complete, time))
            elif kind == "Drop":
                self._open.pop(body["group"], None)


def counts(times: Sequence[float], edges: NDArray[np.float64]) -> list[int]:
    """How many of these times are not after each edge."""
    return np.searchsorted(np.sort(times), edges, "right").tolist()


__all__ = ["KINDS", "Filled", "Fold", "counts"]
