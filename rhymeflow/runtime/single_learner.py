"""The learner group of one rank: a worker that is sent each call as a message.

Holds true: calls arrive in order and none waits. Knows nothing of training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rhymeflow.core.types import Version
from rhymeflow.learner.base import Batch
from rhymeflow.runtime.base import WorkerHandle
from rhymeflow.workers import messages


class SingleLearner:
    """A `learner.base.LearnerGroup` of one worker.

    `worker` says which it is: one that was lost is replaced.
    """

    def __init__(self, worker: Callable[[], WorkerHandle]) -> None:
        self._worker = worker

    def accumulate(self, version: Version, groups: Batch) -> None:
        """Add the gradient of some groups; see `LearnerGroup`."""
        self._worker().send(messages.Accumulate(version, groups.groups, groups.members))

    def train(self, version: Version, batch: Batch) -> None:
        """Train on a batch; see `LearnerGroup`."""
        self._worker().send(messages.Train(version, *batch))

    def publish(self, version: Version) -> None:
        """Publish a version; see `LearnerGroup`."""
        self._worker().send(messages.Publish(version))

    def save(self, keep: Sequence[Version]) -> None:
        """Write a checkpoint; see `LearnerGroup`."""
        self._worker().send(messages.SaveCheckpoint(tuple(keep)))
