"""The learner in a process of its own: reads a batch, trains, publishes the new version.

Holds true: a batch that breaks the staleness bound is refused before it is trained on (law 1, seen
from the data itself: every token carries its version); a version can be pulled before it is
reported; the weights' memory is given back when the process ends. Knows nothing of instances,
routing or rewards.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rhymeflow.config import Config
from rhymeflow.core.types import TrajectoryId, Version
from rhymeflow.errors import UserError
from rhymeflow.learner.base import Batch
from rhymeflow.learner.sample import Sample
from rhymeflow.learner.saver import Saver
from rhymeflow.learner.single import Learner
from rhymeflow.learner.token_details import TokenDetails
from rhymeflow.models.load import load_model, load_tokenizer, resolve_device, resolve_dtype
from rhymeflow.models.rope import settled
from rhymeflow.store.checkpoint_dirs import CHECKPOINTS
from rhymeflow.store.handle import store_in
from rhymeflow.store.reader import TrajectoryRecord
from rhymeflow.utils import progress
from rhymeflow.utils.allocator import keep_freed_memory
from rhymeflow.utils.consecutive_failures import ConsecutiveFailures
from rhymeflow.weights.base import WeightStore
from rhymeflow.weights.manifest import manifest_of
from rhymeflow.weights.proof import as_text, checksum_of
from rhymeflow.weights.stores import make_store
from rhymeflow.workers import messages
from rhymeflow.workers.channel import Connection
from rhymeflow.workers.messages import (
    WAIT_SECONDS,
    Accumulate,
    Accumulated,
    BatchTrained,
    CheckpointFailed,
    CheckpointSaved,
    LearnerReady,
    Publish,
    ResponseDetails,
    Retraining,
    SaveCheckpoint,
    Shutdown,
    Train,
    VersionPublished,
    receive,
    send,
)
from rhymeflow.workers.restore import Damaged, in_a_row, restore, samples

SAVING_SECONDS = 0.05
"""How often an idle learner looks whether a checkpoint is written: a run ends only then."""

STATE_BYTES = 12
"""In a checkpoint, for each parameter: master weight and AdamW's two moments, in float32."""


def main(connection: Connection, name: str, config: Config, run_dir: Path) -> None:
    """Join the run and serve it until `Shutdown`, alone or as the first of many ranks."""
    keep_freed_memory()
    if config.learner.num_ranks > 1:
        from rhymeflow.workers import learner_rank  # loads torch.distributed

        learner_rank.lead(connection, config, run_dir)
        return
    learner = LearnerProcess(connection, config, run_dir)
    try:
        learner.serve()
    finally:
        learner.weights.close()


class LearnerProcess:
    """The learner, the store that it reads batches from, and the weights it publishes."""

    def __init__(self, connection: Connection, config: Config, run_dir: Path) -> None:
        self.connection, self.config = connection, config
        if not run_dir.is_dir():
            raise UserError(
                f"run.output_dir: there is no {run_dir} on {socket.gethostname()}: the learner "
                "writes checkpoints there, so its nodes have to share it with the controller's"
            )
        device = resolve_device(config.model)
        dtype = resolve_dtype(config.model, device)
        self.learner = self._make_learner(device, dtype)
        store = store_in(config, run_dir)
        self._reader = store.open()
        self._saver = self._make_saver(run_dir / CHECKPOINTS)
        began = None  # to train again
        damaged: list[Damaged] = []
        with store.explained():
            for step, last in restore(
                self.learner,
                self._reader,
                run_dir / CHECKPOINTS,
                config,
                checksum=self._checksum(),
                damaged=damaged,
            ):
                began = began or time.perf_counter()
                self._say(Retraining(step, last))
        retrain_seconds = 0.0 if began is None else time.perf_counter() - began
        self.version: Version = self.learner.version
        self._skips = ConsecutiveFailures(
            config.learner.max_skipped_steps,
            "learner.max_skipped_steps",
            "steps",
            in_a_row(self._reader),
        )
        self._begin_batch()
        self.weights = self._make_weights(run_dir)
        checksum = self._publish_weights()
        ready = LearnerReady(
            self.version,
            self.weights.handle,
            as_text(checksum),
            device.type,
            str(dtype).removeprefix("torch."),
            self.learner.model.config.get_text_config().max_position_embeddings,
            self.learner.num_parameters * (dtype.itemsize + STATE_BYTES),
            retrain_seconds,
            self.learner.num_parameters,
            sum(each.numel() for each in self.learner.model.parameters() if each.requires_grad),
            [tuple(each) for each in damaged],
        )
        self._say(ready)
        self._ending = False

    # What ranks do otherwise: see `learner_rank.py`.

    def _make_learner(self, device: torch.device, dtype: torch.dtype) -> Learner:
        return Learner(
            # In float32, so that the master weights are exact; the learner computes in `dtype`.
            settled(load_model(self.config.model, dtype=torch.float32, device=device), self.config),
            load_tokenizer(self.config.model),
            self.config.learner,
            self.config.rollout,
            dtype,
        )

    def _make_saver(self, directory: Path) -> Saver:
        return Saver(directory)

    def _make_weights(self, run_dir: Path) -> WeightStore:
        return make_store(self.config, manifest_of(self.learner.weights()), run_dir)

    def _publish_weights(self) -> int:
        return self.weights.publish(self.version, self.learner.weights())

    def _checksum(self) -> Callable[[], str] | None:
        """What proves restored weights."""
        weights = self.learner.weights()
        return lambda: as_text(checksum_of(manifest_of(weights), weights))

    def _whole(self, details: TokenDetails) -> TokenDetails:
        return details

    def _say(self, message: messages.Message) -> None:
        send(self.connection, message)

    def serve(self) -> None:
        """Carry out what is asked for, until `Shutdown`."""
        progress.has_started = True
        while not self._ending:
            self.turn()

    def turn(self) -> None:
        """Carry out the next thing that is asked for."""
        progress.advance()
        is_saving = self._saver.is_busy
        if not self.connection.poll(SAVING_SECONDS if is_saving else WAIT_SECONDS):
            self._report_saved()
            return
        match receive(self.connection):
            case Accumulate() as message:
                self._accumulate(message.version, Batch(message.groups, message.members))
                self._say(Accumulated(message.version, len(self._early)))
            case Train() as message:
                self._train(message)
            case Publish(version=version):
                self._publish(version)
            case SaveCheckpoint(keep=keep):
                self._saver.begin(self.version, self.learner.snapshot(), keep)
            case Shutdown():
                self._ending = True
            case message:
                raise AssertionError(f"unexpected message {message}")

    def _accumulate(self, version: Version, part: Batch) -> None:
        assert version == self.version, (version, self.version)
        started = time.perf_counter()
        with self._read(part) as (batch, details):
            self.learner.accumulate(batch, details)
        self._early.append(part)
        self._early_seconds += time.perf_counter() - started

    def _train(self, message: Train) -> None:
        assert message.version == self.version, (message.version, self.version)
        *early, rest = Batch(message.groups, message.members, message.parts).cut()
        if self._early != early[: len(self._early)]:  # what was lost on the way, or is of no use
            self.learner.forget()
            self._begin_batch()
        for part in early[len(self._early) :]:
            self._accumulate(message.version, part)
        started = time.perf_counter() - self._early_seconds
        with self._read(rest) as (batch, details):
            metrics = self.learner.train(batch, self.version, details)
        metrics["staleness/mean"] = sum(self._ages) / len(self._ages)
        metrics["staleness/max"] = max(self._ages)
        self.version += 1
        seconds = time.perf_counter() - started
        self._begin_batch()
        skipped = self.learner.skipped
        reason = next(iter(skipped.values()), None)
        self._skips.count(reason)
        self._say(BatchTrained(message.version, metrics, seconds, tuple(skipped), reason or ""))

    def _begin_batch(self) -> None:
        self._early: list[Batch] = []
        """What is accumulated of the next batch."""
        self._early_seconds = 0.0
        self._ages: list[Version] = []
        """Of the next batch's trajectories that were read."""

    @contextmanager
    def _read(self, part: Batch) -> Iterator[tuple[list[Sample], TokenDetails | None]]:
        """What is to be trained on, and where details of it go, which are reported afterwards."""
        records = self._reader.batch(part.groups, part.members)
        self._ages += staleness(records, self.version, self.config.schedule.bound)
        batch = samples(records, self.config)
        details = (
            TokenDetails(batch, self.config.learner) if self.config.run.token_details else None
        )
        yield batch, details
        if details is not None:
            self._report(self._whole(details), records)

    def _report(self, details: TokenDetails, records: list[TrajectoryRecord]) -> None:
        found = [
            ResponseDetails(TrajectoryId(record.group, record.member), logprobs, flags)
            for record, (logprobs, flags) in zip(records, details.blobs(), strict=True)
        ]
        self._say(messages.TokenDetails(self.version, found))

    def _publish(self, version: Version) -> None:
        assert version == self.version, (version, self.version)
        started = time.perf_counter()
        checksum = as_text(self._publish_weights())
        seconds = time.perf_counter() - started
        self._say(VersionPublished(version, checksum, seconds, dict(self.weights.metrics)))

    def _report_saved(self) -> None:
        for version, path, error in self._saver.ended():
            if error is None:
                self._say(CheckpointSaved(version, str(path)))
            else:
                self._say(CheckpointFailed(version, f"{path}: {error}"))


def staleness(
    records: list[TrajectoryRecord], version: Version, max_staleness: int
) -> list[Version]:
    """Return how many versions old each trajectory is when batch `version` is trained on."""
    ages = [version - min(record.versions) for record in records]
    for record, age in zip(records, ages, strict=True):
        if not 0 <= age <= max_staleness:
            raise AssertionError(
                f"trajectory {record.group}.{record.member} in batch {version} is {age} versions "
                f"old; max_staleness is {max_staleness}"
            )
    return ages
