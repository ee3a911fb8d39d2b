"""The learner group of many ranks: each is a worker that is sent each call as a message.

Holds true: every rank is told the same, in the same order, so their collectives match; calls do not
wait. Knows nothing of training, or of who starts ranks and replaces them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rhymeflow.core.types import Version
from rhymeflow.learner.base import Batch, LearnerGroup
from rhymeflow.runtime.base import WorkerHandle
from rhymeflow.runtime.single_learner import SingleLearner
from rhymeflow.runtime.supervisor import Supervisor
from rhymeflow.workers import messages


class RankedLearner:
    """A `learner.base.LearnerGroup` of many workers.

    `workers` says which they are, rank 0 first: when one is lost, all are replaced.
    """

    def __init__(self, workers: Callable[[], Sequence[WorkerHandle]]) -> None:
        self._workers = workers

    def accumulate(self, version: Version, groups: Batch) -> None:
        """Add the gradient of some groups; see `LearnerGroup`."""
        self._send(messages.Accumulate(version, groups.groups, groups.members))

    def train(self, version: Version, batch: Batch) -> None:
        """Train on a batch; see `LearnerGroup`."""
        self._send(messages.Train(version, *batch))

    def publish(self, version: Version) -> None:
        """Publish a version; see `LearnerGroup`."""
        self._send(messages.Publish(version))

    def save(self, keep: Sequence[Version]) -> None:
        """Write a checkpoint; see `LearnerGroup`."""
        self._send(messages.SaveCheckpoint(tuple(keep)))

    def _send(self, message: messages.Message) -> None:
        for worker in self._workers():
            worker.send(message)


def learner_group(supervisor: Supervisor, num_ranks: int) -> LearnerGroup:
    """The learner that `supervisor` has started."""
    if num_ranks == 1:
        return SingleLearner(lambda: supervisor.learner)
    return RankedLearner(lambda: (supervisor.learner, *supervisor.other_ranks))
