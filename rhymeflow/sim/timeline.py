"""What a simulated cluster did, when: spans of instances and learner, and their load.

Holds true: spans of a row follow one another, one that goes on as the last one did lengthens it.
Knows nothing of how it will be looked at (`trace.py`, `picture.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rhymeflow.core.types import Version

Kind = Literal["decode", "prefill", "pull", "train", "push"]


@dataclass(slots=True)
class Span:
    """A stretch of time in which a row did one thing under one version."""

    kind: Kind
    start: float
    end: float
    version: Version


@dataclass(slots=True)
class Row:
    """One instance, or the learner."""

    name: str
    spans: list[Span] = field(default_factory=list)
    loads: list[tuple[float, int, int]] = field(default_factory=list)
    """(seconds, trajectories that run, tokens in the cache), at ends of spans."""


class Timeline:
    """All rows: the learner's, and one for each instance in the order they joined."""

    def __init__(self) -> None:
        self.learner = Row("learner")
        self.instances: list[Row] = []

    def join(self, name: str) -> int:
        """A new row; its index."""
        self.instances.append(Row(name))
        return len(self.instances) - 1

    def span(self, index: int, kind: Kind, start: float, end: float, version: Version) -> None:
        """Instance `index` did this."""
        _append(self.instances[index].spans, kind, start, end, version)

    def load(self, index: int, now: float, running: int, kv_tokens: int) -> None:
        """Instance `index` has so much at `now`."""
        self.instances[index].loads.append((now, running, kv_tokens))

    def learn(self, kind: Kind, start: float, end: float, version: Version) -> None:
        """The learner did this."""
        _append(self.learner.spans, kind, start, end, version)


def _append(spans: list[Span], kind: Kind, start: float, end: float, version: Version) -> None:
    last = spans[-1] if spans else None
    if last and last.kind == kind and last.version == version and last.end == start:
        last.end = end
    else:
        spans.append(Span(kind, start, end, version))
