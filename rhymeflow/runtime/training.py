"""Commands the learner's ranks, and turns their messages into events.

One batch is trained on at a time. A learner that replaces a lost one repeats what was not reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rhymeflow.core.commands import Accumulate, Train
from rhymeflow.core.events import Accumulated, Event, LearnerReady, VersionPublished
from rhymeflow.core.types import Version
from rhymeflow.runtime.checkpoints import Checkpoints
from rhymeflow.runtime.evaluation import EvaluationResult
from rhymeflow.runtime.reporting import Reporter
from rhymeflow.runtime.supervisor import Supervisor
from rhymeflow.suites.figures import metrics_of
from rhymeflow.workers import messages

if TYPE_CHECKING:
    from rhymeflow.store.writer import SqliteTrajectoryStore


class Training:
    """The controller's side of the learner, which begins with version `published`. All ranks get
    the same messages in the same order, so that their collectives match."""

    def __init__(
        self,
        supervisor: Supervisor,
        checkpoints: Checkpoints,
        store: SqliteTrajectoryStore,
        reporter: Reporter,
        published: Version,
    ) -> None:
        self.checkpoints, self.published = checkpoints, published
        self._supervisor, self._store, self._reporter = supervisor, store, reporter
        self.weights: messages.ConnectWeights | None = None
        """Where instances find the weights, once there is a version to pull."""
        self.batch: Train | None = None  # the batch that is being trained on
        self.checkpoint: str | None = None  # the path of the newest complete checkpoint
        self.last_step: tuple[messages.BatchTrained, messages.Publication]
        """What the learner reported of the last published step."""
        self._trained: messages.BatchTrained | None = None  # of a step that is not published yet

    def accumulate(self, command: Accumulate) -> None:
        """Start on the gradient of the next batch with these groups, if there is a learner."""
        if self.weights is not None:
            self._tell(command)

    def begin(self, command: Train) -> None:
        """Train on a stored batch, publish the version that it makes, and save it if due."""
        self.batch = command
        self._begin_training()
        reached = command.version + 1
        self._tell(command)
        self._tell(messages.Publish(reached))
        if self.checkpoints.is_due(reached):
            self._save(reached)

    def _begin_training(self) -> None:
        """Have steps measured from here: a resumed run may train before it has an instance."""
        if self.weights is not None and self.batch is not None:
            self._reporter.begin_training()

    def save(self) -> None:
        """Save the version that the learner has after this batch, unless a checkpoint has it."""
        version = self.published + (self.batch is not None)
        if version not in self.checkpoints:
            self._save(version)

    def evaluated(self, result: EvaluationResult) -> None:
        """Report a suite's figures, and remember them for the choice of the best checkpoint."""
        version, suite, figures = result.event.held, result.event.suite, result.figures
        assert version is not None
        if result.error:
            count = f"{figures['failed']:.0f} answers to suite {suite} under version {version}"
            self._reporter.warn(f"{count} are not judged: {result.error}")
        metrics = metrics_of(suite, figures)
        self.checkpoints.evaluated(version, metrics)
        self._reporter.evaluated(version, metrics)

    def hear(self, message: Any) -> Iterator[Event]:
        """Yield the events that follow from a message of the learner."""
        match message:
            case messages.Envelope(LearnerReady() as ready, loaded):
                self._warn_about(loaded)
                self.checkpoints.restored(loaded.retrain_seconds)
                self.weights = messages.ConnectWeights(loaded.handle)
                self._reporter.say("training")
                self._begin_training()
                yield ready
            case messages.Retraining():
                self._reporter.say(f"training again: {message.version} of {message.last}")
            case messages.BatchDetails():
                for details in message.responses:
                    self._store.put_token_details(*details)
            case Accumulated():
                yield message
            case messages.BatchTrained():
                self._trained = message
            case messages.Envelope(VersionPublished(version=version) as published, data):
                trained = self._trained
                assert trained is not None
                self.last_step = trained, data
                self.checkpoints.trained(trained.seconds / self._reporter.scale)
                self.batch, self._trained, self.published = None, None, version
                if published.skipped:
                    self._reporter.warn(f"step {version} is skipped: {published.reason}")
                yield published
            case messages.CheckpointEnded(version, path, None):
                self.checkpoints.saved(version)
                self.checkpoint = path
                self._reporter.saved(version, path)
            case messages.CheckpointEnded(version, path, error):
                self.checkpoints.failed(version)
                self._reporter.warn(f"no checkpoint of version {version}: {path}: {error}")
            case _:
                raise AssertionError(f"unexpected message {message}")

    def _warn_about(self, message: messages.LoadedModel) -> None:
        if message.num_trained < message.num_parameters:
            self._reporter.warn(
                f"training {message.num_trained:,} of {message.num_parameters:,} "
                "parameters; the others are frozen (learner.frozen_parameters)"
            )
        for version, problem in message.damaged:
            self.checkpoints.discard(version)
            self._reporter.warn(f"{problem}: skipped; the batches since an earlier one train again")

    def lose(self) -> None:
        """Prepare for another learner, which restores the last published version."""
        self.weights = self._trained = None
        unfinished = self.checkpoints.lose_pending()
        if self.batch is not None:
            self.begin(self.batch)
        elif self.published in unfinished:
            self._save(self.published)

    def _save(self, version: Version) -> None:
        backup = self._reporter.backup
        kept = self.checkpoints.begin(version, None if backup is None else backup.needed)
        self._tell(messages.SaveCheckpoint(kept))

    def _tell(self, message: messages.AnyMessage) -> None:
        for worker in self._supervisor.ranks:
            worker.send(message)
