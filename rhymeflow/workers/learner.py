"""The learner in a process of its own: reads a batch, trains, publishes the new version.

Holds true: a batch that breaks the staleness bound is refused before it is trained on (law 1, seen
from the data itself: every token carries its version); a version is in the weight store before
it is reported. Knows nothing of instances, routing or rewards.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from rhymeflow.config import Config
from rhymeflow.core.types import Version
from rhymeflow.learner.sample import Sample
from rhymeflow.learner.single import Learner
from rhymeflow.models.load import load_model, load_tokenizer, resolve_device, resolve_dtype
from rhymeflow.store.reader import TrajectoryReader, TrajectoryRecord
from rhymeflow.weights.manifest import manifest_of
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore
from rhymeflow.workers import messages

ALIVE_SECONDS = 1.0
"""How often an idle learner gives a sign of life."""


def main(connection: Connection, name: str, config: Config, run_dir: str) -> None:
    """Join the run and serve it until told to end."""
    LearnerProcess(connection, config, Path(run_dir)).serve()


class LearnerProcess:
    """The learner, its view of the trajectory store and the weight store it pushes to."""

    def __init__(self, connection: Connection, config: Config, run_dir: Path) -> None:
        self.connection, self.config, self.run_dir = connection, config, run_dir
        device = resolve_device(config.model)
        dtype = resolve_dtype(config.model, device)
        self.learner = Learner(
            # In float32, so that the master weights are exact; the learner computes in `dtype`.
            load_model(config.model, dtype=torch.float32, device=device),
            load_tokenizer(config.model),
            config.learner,
            config.rollout,
            dtype,
        )
        weights = self.learner.weights()
        manifest = manifest_of(weights)
        count = sum(tensor.numel() for tensor in weights.values())
        messages.send(connection, messages.LearnerLoaded(manifest, count))
        connect = messages.receive(connection)
        assert isinstance(connect, messages.ConnectWeights), connect
        self.weight_store = SharedMemoryWeightStore.attach(connect.handle)
        self.version = 0
        self.weight_store.push(self.version, weights)
        self.trajectories = TrajectoryReader(run_dir / "events.db")
        messages.send(connection, messages.LearnerUp(self.version))

    def serve(self) -> None:
        """Train on what is asked for, until `Shutdown`."""
        while True:
            if not self.connection.poll(ALIVE_SECONDS):
                messages.send(self.connection, messages.LearnerAlive())
                continue
            match messages.receive(self.connection):
                case messages.TrainBatch() as message:
                    self._train(message)
                case messages.SaveCheckpoint():
                    self._save()
                case messages.Shutdown():
                    return
                case message:
                    raise AssertionError(f"unexpected message {message}")

    def _train(self, message: messages.TrainBatch) -> None:
        assert message.version == self.version, (message.version, self.version)
        started = time.perf_counter()
        records = self.trajectories.batch(message.groups, message.members)
        ages = staleness(records, self.version, self.config.schedule.bound)
        metrics = self.learner.train([_sample(r) for r in records], self.version)
        metrics["staleness/mean"] = sum(ages) / len(ages)
        metrics["staleness/max"] = max(ages)
        trained = time.perf_counter()
        self.version += 1
        self.weight_store.push(self.version, self.learner.weights())
        pushed = time.perf_counter()
        report = messages.BatchTrained(
            message.version, metrics, trained - started, pushed - trained
        )
        messages.send(self.connection, report)
        if message.save:
            self._save()

    def _save(self) -> None:
        path = self.run_dir / "checkpoints" / f"step-{self.version}"
        self.learner.save(path)
        messages.send(self.connection, messages.CheckpointSaved(self.version, str(path)))


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


def _sample(record: TrajectoryRecord) -> Sample:
    return Sample(
        group=record.group,
        prompt_ids=record.prompt_ids,
        completion_ids=record.completion_ids,
        logprobs=record.logprobs,
        versions=record.versions,
        reward=record.reward,
        truncated=record.reason != "stop",
    )
