"""Commands of the coordinator. A runtime carries them out and reports events.

Commands to one instance are numbered from 1 and carried out in that order, each exactly once even
if it is delivered twice. A trajectory that has finished in the meantime is skipped."""

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
    """Generate the trajectory on this instance, continuing from its stored tokens. `version`: the
    instance holds this version or a newer one by then. In a trajectory's first Route it is the
    trajectory's V_traj."""

    instance: InstanceId
    number: int
    trajectory: TrajectoryId
    version: Version


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Stop these trajectories, store their tokens and report each as `TrajectoryInterrupted`."""

    instance: InstanceId
    number: int
    trajectories: tuple[TrajectoryId, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop and forget these trajectories; no report is expected."""

    instance: InstanceId
    number: int
    trajectories: tuple[TrajectoryId, ...]


@dataclass(frozen=True, slots=True)
class CloseEnvironments:
    """Close the environments of trajectories that were aborted while on no instance."""

    trajectories: tuple[TrajectoryId, ...]


@dataclass(frozen=True, slots=True)
class Pull:
    """Load `version` from the weight store, verify its checksum, and continue under it."""

    instance: InstanceId
    number: int
    version: Version


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Generate and reward responses to a suite's prompts, under the version the instance holds."""

    instance: InstanceId
    number: int
    version: Version
    suite: SuiteName = HELD_OUT


@dataclass(frozen=True, slots=True)
class FinishEarly:
    """Reward the stored tokens of a waiting trajectory as its whole response. Its finish reason is
    `finished_early`. It is on no instance; no `TrajectoryFinished` follows."""

    trajectory: TrajectoryId


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Compute the gradient of these groups of batch `version` ahead of its `Train`. `Train` names
    them again, so a lost `Accumulate` only costs time. The learner reports `Accumulated`."""

    version: Version
    groups: tuple[GroupId, ...]
    members: tuple[tuple[int, ...], ...]  # as in `Train`


@dataclass(frozen=True, slots=True)
class Train:
    """Train on batch `version`, these groups in this order, and publish `version + 1`."""

    version: Version
    groups: tuple[GroupId, ...]
    members: tuple[tuple[int, ...], ...]  # to train on, for each group, in ascending order
    parts: tuple[int, ...] = ()
    """Number of groups of each `Accumulate` of this batch; those groups come first in `groups`. The
    learner sums the gradients of these parts and of the remaining groups in this order, so that the
    log determines rounding."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Record that the group ended untrained. Other commands abort its running members."""

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
