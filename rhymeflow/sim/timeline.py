"""What a simulated cluster did, when: spans of instances and learner, and their load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from rhymeflow.core.types import Version

Kind = Literal["decode", "prefill", "pull", "train", "push", "restore", "idle"]


@dataclass(slots=True)
class Span:
    """An interval of time in which a row did one thing under one version."""

    kind: Kind
    start: float
    end: float
    version: Version


@dataclass(slots=True)
class Row:
    """One instance, or the learner."""

    name: str
    joined: float
    left: float | None = None
    """None: it was there at the end."""
    spans: list[Span] = field(default_factory=list)
    loads: list[tuple[float, int, int]] = field(default_factory=list)
    """(from when on, trajectories that run, tokens in the cache)."""

    def append(self, kind: Kind, start: float, end: float, version: Version) -> None:
        """It did this."""
        last = self.spans[-1] if self.spans else None
        if last and last.kind == kind and last.version == version and last.end == start:
            last.end = end
        else:
            self.spans.append(Span(kind, start, end, version))

    def with_idle(self, end: float) -> Iterator[Span]:
        """Its spans, and those in which it did nothing, until the run's `end`."""
        now, version = self.joined, 0
        for span in self.spans:
            if span.start > now:
                yield Span("idle", now, span.start, version)
            yield span
            now, version = span.end, span.version
        until = end if self.left is None else self.left
        if until > now:
            yield Span("idle", now, until, version)


class Timeline:
    """All rows: the learner's, and one for each instance in the order they joined."""

    def __init__(self) -> None:
        self.learner = Row("learner", 0.0)
        self.instances: list[Row] = []

    @property
    def end(self) -> float:
        """The time of the last thing that was done."""
        rows = [self.learner, *self.instances]
        return max((row.spans[-1].end for row in rows if row.spans), default=0.0)

    def sample(self, num_rows: int) -> list[Row]:
        """So many instances, evenly chosen, or all where there are no more."""
        most = len(self.instances)
        if most <= num_rows:
            return self.instances
        return [self.instances[i * most // num_rows] for i in range(num_rows)]

    def join(self, name: str, now: float) -> Row:
        """A new row."""
        self.instances.append(Row(name, now))
        return self.instances[-1]
