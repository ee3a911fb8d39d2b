"""What one training run's event log says about time.

Holds true: a run is ready when the first response could begin, that is, when a version is published
and an instance has joined: loading is over, and no schedule has won or lost anything yet. An
evaluation counts from when its result is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import msgspec

from rhymeflow.core.events import Evaluated, InstanceJoined, LearnerReady, VersionPublished
from rhymeflow.dashboard.timeline import Body, Fold, Span
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import EVENTS

_LINES = """SELECT time, kind, body FROM (
    SELECT time, kind, body, seq AS event, 0 AS command FROM events
    UNION ALL
    SELECT time, c.kind, c.body, event, c.seq FROM commands c JOIN events e ON e.seq = event)
    ORDER BY event, command"""
"""The log in order, commands after the event upon which they were given."""


class Evaluation(msgspec.Struct, frozen=True):
    seconds: float
    version: int
    reward: float


class Run(msgspec.Struct, frozen=True):
    """One run; seconds are those of its log."""

    ready: float
    evaluations: list[Evaluation]
    """In the order their results were known."""
    published: list[float]
    """Seconds of version 1, 2 and so on."""
    staleness: int
    """Greatest of all trained trajectories."""
    rollout: float = 0.0
    """Seconds in which an instance generated or evaluated."""
    training: float = 0.0
    """Seconds in which the learner trained."""


class Reached(msgspec.Struct, frozen=True):
    """When held-out reward reached the goal; `is_goal` is false if the run ended before."""

    is_goal: bool
    seconds: float
    """From ready to the evaluation's result."""
    steps: int


def read(run_dir: Path) -> Run:
    with closing(TrajectoryReader(run_dir / EVENTS)) as reader:
        first: dict[type, float] = {}
        evaluations, published = [], []
        for _, time, event in reader.events():
            match event:
                case LearnerReady() | InstanceJoined():
                    first.setdefault(type(event), time)
                case Evaluated():
                    evaluations.append(Evaluation(time, event.version, event.reward))
                case VersionPublished():
                    published.append(time)
        ((staleness,),) = reader.query("SELECT MAX(staleness) FROM trained")
        spans = _spans(reader)
    ready = max(first[LearnerReady], first[InstanceJoined])
    rollout, training = (
        sum(b - a for a, b in joined((s.start, s.end) for s in spans if s.kind in kinds))
        for kinds in (("generating", "evaluation"), ("training",))
    )
    return Run(ready, evaluations, published, staleness, rollout, training)


def reached(run: Run, goal: float) -> Reached:
    """The first evaluation at or above the goal; no interpolation between evaluations.

    A run that ended before the goal counts with all its time.
    """
    for evaluation in run.evaluations:
        if evaluation.reward >= goal:
            return Reached(True, evaluation.seconds - run.ready, evaluation.version)
    last = max([run.published[-1], *(e.seconds for e in run.evaluations)])
    return Reached(False, last - run.ready, len(run.published))


def phases_allow(run: Run) -> float:
    """What part of a synchronous run's time would be left if rollout and training went on at once
    and neither ever waited: the longer of the two over their sum."""
    return max(run.rollout, run.training) / (run.rollout + run.training)


def joined(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """What is in at least one of these: intervals that do not touch, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > start:
            found.append((start, end))
    return found


def _spans(reader: TrajectoryReader) -> list[Span]:
    fold = Fold()
    for time, kind, body in reader.query(_LINES):
        fold.take(time, kind, msgspec.json.decode(body, type=Body))
    return fold.ended + fold.open()


def steps_per_second(run: Run) -> float:
    """From the first version to the last."""
    return (len(run.published) - 1) / (run.published[-1] - run.published[0])
