"""What one training run says about time and lengths, read from its event log.

Holds true: seconds are those of the log, whose 0 is when the controller begins to load; a run is
ready when the first response could be begun: a version is published and an instance has joined.
Loading is over then, and nothing has been done yet that a schedule could win or lose by. An
evaluation counts from when its result is known. Groups stand in the order in which they were
requested.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from rhymeflow.core.events import Evaluated, InstanceJoined, LearnerReady, VersionPublished
from rhymeflow.observe.summary import EVENTS
from rhymeflow.store.reader import TrajectoryReader


class Evaluation(msgspec.Struct, frozen=True):
    """Held-out reward of one version."""

    seconds: float
    version: int
    reward: float


class Group(msgspec.Struct, frozen=True):
    """A prompt that was drawn, and its members."""

    row: int
    epoch: int
    batch: int | None
    """That it was trained on in."""
    lengths: list[int]
    """Tokens stored of each member."""
    endings: list[str]
    """Of each member: `consumed`, `filtered`, `aborted`, or `unfinished` when the run ended."""


class Run(msgspec.Struct, frozen=True):
    """One run."""

    ready: float
    evaluations: list[Evaluation]
    """In the order in which they were known."""
    published: list[float]
    """Seconds of version 1, 2 and so on."""
    staleness: int
    """Greatest that was trained on."""
    groups: list[Group]


class Reached(msgspec.Struct, frozen=True):
    """When held-out reward reached the goal; `is_goal` is false of a run that ended before."""

    is_goal: bool
    seconds: float
    """From when the run was ready to when it was known."""
    from_start: float
    """The same from the log's beginning."""
    published: float
    """From when the run was ready to the publication of that version."""
    steps: int


def read(run_dir: Path, num_members: int) -> Run:
    """Read a run whose groups have so many members."""
    reader = TrajectoryReader(run_dir / EVENTS)
    try:
        up: dict[type, float] = {}
        evaluations, published = [], []
        for _, time, event in reader.events():
            match event:
                case LearnerReady() | InstanceJoined():
                    up.setdefault(type(event), time)
                case Evaluated():
                    evaluations.append(Evaluation(time, event.version, event.reward))
                case VersionPublished():
                    published.append(time)
        ((staleness,),) = reader.query("SELECT MAX(staleness) FROM trained")
        groups = _groups(reader, num_members)
    finally:
        reader.close()
    ready = max(up[LearnerReady], up[InstanceJoined])
    return Run(ready, evaluations, published, staleness, groups)


def reached(run: Run, goal: float) -> Reached:
    """The first evaluation at or above the goal; not between evaluations, where nobody looked."""
    for evaluation in run.evaluations:
        if evaluation.reward >= goal:
            version = evaluation.version
            made = run.published[version - 1] if version else run.ready
            seconds = evaluation.seconds
            return Reached(True, seconds - run.ready, seconds, made - run.ready, version)
    last = max([run.published[-1], *(e.seconds for e in run.evaluations)])
    return Reached(False, last - run.ready, last, run.published[-1] - run.ready, len(run.published))


def steps_per_second(run: Run) -> float:
    """From the first version to the last."""
    return (len(run.published) - 1) / (run.published[-1] - run.published[0])


def _groups(reader: TrajectoryReader, num_members: int) -> list[Group]:
    """Groups that were drawn; a member without tokens shares its group's ending."""
    members: dict[int, dict[int, tuple[Any, ...]]] = defaultdict(dict)
    for group, member, *facts in reader.query(
        "SELECT group_id, member, length, COALESCE(ending, 'unfinished'), trained FROM responses"
    ):
        members[group][member] = tuple(facts)
    found = []
    for group, row, epoch, ending in reader.query(
        "SELECT group_id, row, epoch, COALESCE(ending, 'unfinished') FROM groups ORDER BY group_id"
    ):
        nothing = (0, "aborted" if ending == "consumed" else ending, None)
        fates = [members[group].get(member, nothing) for member in range(num_members)]
        lengths, endings, trained = (list(column) for column in zip(*fates, strict=True))
        batch = next((version for version in trained if version is not None), None)
        found.append(Group(row, epoch, batch, lengths, endings))
    return found
