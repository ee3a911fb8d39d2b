"""The seam between a run and its learner: one process, or many ranks that train as one.

The controller tells a `LearnerGroup` what to train on and when to publish. Whether that is one
message to one worker or one to each of many ranks is the group's business; so is restarting ranks.
Answers come as messages (`Accumulated`, `BatchTrained`, `VersionPublished`, `CheckpointSaved`,
`CheckpointFailed`).

Training and publishing are two calls, because a run that is resumed trains stored batches again
without publishing each version in between.

Knows no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from rhymeflow.core.types import GroupId, Version


class Batch(NamedTuple):
    """Names what is trained on; every rank reads its share of it from the trajectory store."""

    groups: tuple[GroupId, ...]
    members: tuple[tuple[int, ...], ...]
    """For each group, the members to train on, in ascending order."""
    parts: tuple[int, ...] = ()
    """How many of the first groups each earlier `accumulate` had."""

    def cut(self) -> list[Batch]:
        """Its parts, the last of which is the rest and may be empty."""
        ends = [*accumulate(self.parts, initial=0), len(self.groups)]
        return [
            Batch(self.groups[start:end], self.members[start:end]) for start, end in pairwise(ends)
        ]


class LearnerGroup(Protocol):
    """All ranks of the learner. Calls do not wait and are carried out in order."""

    def accumulate(self, version: Version, groups: Batch) -> None:
        """Add the gradient of some groups of batch `version`, ahead of `train`."""

    def train(self, version: Version, batch: Batch) -> None:
        """Train the policy of `version` on `batch`, making `version + 1`."""

    def publish(self, version: Version) -> None:
        """Let instances pull `version`, which the ranks hold."""

    def save(self, keep: Sequence[Version]) -> None:
        """Write a checkpoint of the version that the ranks hold, while they go on.

        When it is complete, earlier ones of other versions than `keep` are deleted.
        """
