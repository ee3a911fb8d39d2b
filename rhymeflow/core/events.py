"""Facts reported to the mind. Each is stored before it is acted on.

A fact says what has happened, never what to do; it can arrive late or twice. Heavy data (tokens,
log-probabilities, weights) is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rhymeflow.core.types import FinishReason, GroupId, InstanceId, TrajectoryId, Version


@dataclass(frozen=True, slots=True)
class GroupDrawn:
    """The data gave one more prompt: group `group` is `prompt` (row number) in `epoch`."""

    group: GroupId
    prompt: int
    epoch: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class InstanceJoined:
    """An instance is up, holds `version`, and decodes up to `capacity` trajectories at a time."""

    instance: InstanceId
    version: Version
    capacity: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """The instance carried out its command `number`: it holds `version`, checksum proved."""

    instance: InstanceId
    number: int
    version: Version


@dataclass(frozen=True, slots=True)
class TrajectoryFinished:
    """The response is complete and stored, `length` tokens long."""

    trajectory: TrajectoryId
    instance: InstanceId
    length: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class TrajectoryRewarded:
    """The weighted sum of the reward functions for a finished response."""

    trajectory: TrajectoryId
    reward: float


@dataclass(frozen=True, slots=True)
class RewardFailed:
    """No reward could be had for a finished response, after all retries."""

    trajectory: TrajectoryId
    error: str


@dataclass(frozen=True, slots=True)
class LearnerReady:
    """The learner is up and the parameter server holds `version`."""

    version: Version


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """Training on batch `version - 1` is over and the parameter server holds `version`."""

    version: Version


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Held-out prompts were answered and judged under `version`: `reward` is their mean."""

    instance: InstanceId
    version: Version
    reward: float


Event = (
    GroupDrawn
    | InstanceJoined
    | Pulled
    | TrajectoryFinished
    | TrajectoryRewarded
    | RewardFailed
    | LearnerReady
    | VersionPublished
    | Evaluated
)
