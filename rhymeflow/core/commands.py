"""Intents of the mind. A body carries them out and reports facts.

Commands to one instance are numbered from 1 and carried out in that order; one delivered twice is
carried out once.
"""

from __future__ import annotations

from dataclasses import dataclass

from rhymeflow.core.types import GroupId, InstanceId, TrajectoryId, Version


@dataclass(frozen=True, slots=True)
class Draw:
    """Take `count` more prompts from the data and report each as `GroupDrawn`."""

    count: int


@dataclass(frozen=True, slots=True)
class Route:
    """Produce the trajectory on this instance."""

    instance: InstanceId
    number: int
    trajectory: TrajectoryId


@dataclass(frozen=True, slots=True)
class Pull:
    """Interrupt what runs, take `version` from the parameter server, prove it, go on."""

    instance: InstanceId
    number: int
    version: Version


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Answer the held-out prompts on this instance, under the version it holds."""

    instance: InstanceId
    number: int
    version: Version


@dataclass(frozen=True, slots=True)
class Train:
    """Train on batch `version`, these groups in this order, and publish `version + 1`."""

    version: Version
    groups: tuple[GroupId, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """The group ended without being trained on; what is still running of it is stopped."""

    group: GroupId
    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is complete: save and stop."""


InstanceCommand = Route | Pull | Evaluate
Command = Draw | Route | Pull | Evaluate | Train | Drop | Finish
