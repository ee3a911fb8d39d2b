"""Commands of the coordinator. A runtime carries them out and reports events.

Commands to one instance are numbered from 1 and carried out in that order, each once however often
it is delivered. A trajectory that has finished meanwhile is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass

from rhymeflow.core.types import (
    HELD_OUT,
    Ending,
    GroupId,
    InstanceId,
    SuiteName,
    TrajectoryId,
    Version,
)


@dataclass(frozen=True, slots=True)
class RequestPrompts:
    """Take `count` more prompts from the data and report each as `GroupCreated`."""

    count: int


@dataclass(frozen=True, slots=True)
class RetryPrompt:
    """Take the prompt of this ended group again and report a new group by `GroupCreated`."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class Route:
    """Generate the trajectory on this instance, continuing from what is stored of it.

    `version`: the instance holds it by then, or a newer one; in a trajectory's first, its V_traj.
    """

    instance: InstanceId
    number: int
    trajectory: TrajectoryId
    version: Version


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Stop these, store their tokens and report each as `TrajectoryInterrupted`."""

    instance: InstanceId
    number: int
    trajectories: tuple[TrajectoryId, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop and forget these; no report is expected."""

    instance: InstanceId
    number: int
    trajectories: tuple[TrajectoryId, ...]


@dataclass(frozen=True, slots=True)
class CloseEnvironments:
    """Close the environments of these, which were aborted while no instance had them."""

    trajectories: tuple[TrajectoryId, ...]


@dataclass(frozen=True, slots=True)
class Pull:
    """Load `version` from the weight store, prove it, and continue with what runs under it."""

    instance: InstanceId
    number: int
    version: Version


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Answer a suite's prompts on this instance, under the version it holds."""

    instance: InstanceId
    number: int
    version: Version
    suite: SuiteName = HELD_OUT


@dataclass(frozen=True, slots=True)
class FinishEarly:
    """Take the stored tokens of a waiting trajectory as its whole response and have it rewarded.

    Its finish reason is `finished_early`. No instance has it; no `TrajectoryFinished` follows.
    """

    trajectory: TrajectoryId


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Compute the gradient of these groups of batch `version` ahead of its `Train`.

    `Train` names them again, so a lost `Accumulate` costs time alone. The learner reports
    `Accumulated`.
    """

    version: Version
    groups: tuple[GroupId, ...]
    members: tuple[tuple[int, ...], ...]  # as in `Train`


@dataclass(frozen=True, slots=True)
class Train:
    """Train on batch `version`, these groups in this order, and publish `version + 1`."""

    version: Version
    groups: tuple[GroupId, ...]
    members: tuple[tuple[int, ...], ...]
    """For each group, the members to train on, in ascending order."""
    parts: tuple[int, ...] = ()
    """How many of the first groups each `Accumulate` had. The learner sums the gradient of these
    parts and of the rest, so that the log determines its rounding."""


@dataclass(frozen=True, slots=True)
class Drop:
    """The group ended without being trained on. Other commands abort its members that run."""

    group: GroupId
    ending: Ending
    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is complete: save and stop."""


InstanceCommand = Route | Interrupt | Abort | Pull | Evaluate
Command = (
    InstanceCommand
    | RequestPrompts
    | RetryPrompt
    | FinishEarly
    | CloseEnvironments
    | Accumulate
    | Train
    | Drop
    | Finish
)
