"""What one training run's event log says about time.

Holds true: a run is ready when the first response could begin, that is, when a version is published
and an instance has joined: loading is over, and no schedule has won or lost anything yet. An
evaluation counts from when its result is known.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec

from rhymeflow.core.events import Evaluated, InstanceJoined, LearnerReady, VersionPublished
from rhymeflow.observe.summary import EVENTS
from rhymeflow.store.reader import TrajectoryReader


class Evaluation(msgspec.Struct, frozen=True):
    """Held-out reward of one version."""

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


class Reached(msgspec.Struct, frozen=True):
    """When held-out reward reached the goal; `is_goal` is false if the run ended before."""

    is_goal: bool
    seconds: float
    """From ready to the evaluation's result."""
    steps: int


def read(run_dir: Path) -> Run:
    """Read the log of a run that has ended."""
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
    ready = max(first[LearnerReady], first[InstanceJoined])
    return Run(ready, evaluations, published, staleness)


def reached(run: Run, goal: float) -> Reached:
    """The first evaluation at or above the goal; no interpolation between evaluations.

    A run that ended before the goal counts with all its time.
    """
    for evaluation in run.evaluations:
        if evaluation.reward >= goal:
            return Reached(True, evaluation.seconds - run.ready, evaluation.version)
    last = max([run.published[-1], *(e.seconds for e in run.evaluations)])
    return Reached(False, last - run.ready, len(run.published))


def steps_per_second(run: Run) -> float:
    """From the first version to the last."""
    return (len(run.published) - 1) / (run.published[-1] - run.published[0])
