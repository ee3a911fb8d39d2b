"""Commands of the coordinator. A runtime carries them out and reports events.

Commands to one instance are numbered from 1 and carried out in that order; one delivered twice is
carried out once. A trajectory that is no longer there is passed over: it has finished meanwhile.
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
    """Take the prompt of this ended group once more; report a new group by `GroupCreated`."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class Route:
    """Generate the trajectory on this instance, continuing from what is stored of it.

    `version`: what the instance holds by then, or older; in a trajectory's first, its V_traj."""

    instance: InstanceId
    number: int
    trajectory: TrajectoryId
    version: Version


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Stop these, store what there is of them, report each as `TrajectoryInterrupted`."""

    instance: InstanceId
    number: int
    trajectories: tuple[TrajectoryId, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop these; nothing more will be asked about them, and nothing need be reported."""

    instance: InstanceId
    number: int
    trajectories: tuple[TrajectoryId, ...]


@dataclass(frozen=True, slots=True)
class CloseEnvironments:
    """These wait, for an answer or to be routed, and nobody waits for them any more. Of those that
    an instance has, `Abort` says so."""

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
    """Take what is stored of this trajectory, which waits, for complete, and have it rewarded.

    Its reason is `finished_early`. No instance has it, and no `TrajectoryFinished` is reported.
    """

    trajectory: TrajectoryId


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Add the gradient of these groups to that of batch `version`, to which they will belong.

    Ahead of its `Train`, which says everything once more: it may be lost, and then costs time
    alone. The learner reports `Accumulated`.
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
    """How many of the first groups each `Accumulate` had. A learner computes the gradient in these
    parts and the rest, so the rounding of its sum is known from the log."""


@dataclass(frozen=True, slots=True)
class Drop:
    """The group ended without being trained on. Aborts of what runs of it are commanded apart."""

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
