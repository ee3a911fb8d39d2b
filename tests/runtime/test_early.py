"""Gradients of groups that are complete before their batch is: in real runs, with deaths."""

from __future__ import annotations

import os
import signal
import sqlite3
from pathlib import Path

import pytest
import torch

from rhymeflow.core.commands import Accumulate, Train
from rhymeflow.core.events import LearnerReady, VersionPublished
from rhymeflow.learner.sample import Batch
from rhymeflow.runtime.controller import Controller
from rhymeflow.workers import messages
from rhymeflow.workers.learner import LearnerProcess
from tests.runtime.logs import check_bound, check_replay, replay, train
from tests.runtime.test_resume import audit, resume, small, train_until

ONE_BY_ONE = {"num_generations": 3, "max_completion_length": 40, "max_num_seqs": 1}
"""One at a time, so that groups are complete one after another."""


def a_run(directory: Path, **sections):
    """Batches of which nearly all have groups that are accumulated; checkpoints are few."""
    return small(
        directory,
        learner={"groups_per_batch": 4},
        rollout=ONE_BY_ONE,
        run={"save_steps": 0, "save_seconds": 0},
        **sections,
    )


def commanded(config, kind: type) -> list:
    return [c for _, commands in replay(config) for c in commands if isinstance(c, kind)]


def check_parts(config) -> None:
    """Batches were begun early, and each says in which parts."""
    early = commanded(config, Accumulate)
    batches = commanded(config, Train)
    assert sum(bool(each.parts) for each in batches) >= 3
    for batch in batches:
        parts = [part.groups for part in Batch(batch.groups, batch.members, batch.parts).cut()]
        assert len(parts[-1]) > 0 or len(parts) > 1
        assert set(parts[:-1]) <= {each.groups for each in early if each.version == batch.version}


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0, 2])
def test_a_run_that_is_killed_is_the_same_to_the_last_bit(tmp_path, monkeypatch, bound):
    """All its batches are trained on again, in the parts that they were trained on in, which gives
    the same weights."""
    config = a_run(tmp_path, schedule={"max_staleness": bound})
    train_until(monkeypatch, config, lambda c: c.training.published == 4)
    resume(tmp_path / "run")
    check_replay(config)
    check_bound(config)
    check_parts(config)
    audit(tmp_path / "run")
    check_restored(config, version=4)


def check_restored(config, version: int) -> None:
    """The learner that took another's place had the weights that were published."""
    events = [event for event, _ in replay(config)]
    said = [e for e in events if isinstance(e, VersionPublished | LearnerReady)]
    published, restored = (e.checksum for e in said if e.version == version)
    assert restored == published


@pytest.mark.slow
def test_a_learner_that_dies_with_half_a_batch_loses_no_group(tmp_path, monkeypatch):
    config = a_run(tmp_path)
    killed = []
    turn = Controller._tick

    def tick(self):
        turn(self)
        state = self.coordinator.state
        if state.published == 2 and state.accumulated and not killed:
            killed.append(self.supervisor.learner.pid)
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(Controller, "_tick", tick)
    train(config)
    assert killed
    check_replay(config)
    check_parts(config)
    check_restored(config, version=2)
    audit(tmp_path / "run")


class Script:
    """A connection that says what it was given, and keeps what it is told."""

    def __init__(self, *said: messages.Message) -> None:
        self.said, self.heard = [messages.encode(each) for each in said], []

    def poll(self, timeout: float = 0.0) -> bool:
        return bool(self.said)

    def recv_bytes(self) -> bytes:
        return self.said.pop(0)

    def send_bytes(self, message: bytes) -> None:
        self.heard.append(messages.decode(message))


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run of two steps, whose first batch had two parts at least, or was complete at once."""
    directory = tmp_path_factory.mktemp("ended")
    config = a_run(directory).model_copy()
    train(config)
    return config, commanded(config, Train)[0]


@pytest.mark.slow
@pytest.mark.parametrize("said", ["nothing", "the parts", "one of them", "other parts"])
def test_what_a_learner_trains_depends_on_train_alone(ended, tmp_path, said):
    """Whatever of `Accumulate` was lost on its way, or was for nothing."""
    config, batch = ended
    config = config.model_copy(deep=True)
    groups, members, parts = batch.groups, batch.members, (1, 2)
    whole = messages.Train(0, groups, members, parts)
    first, second, rest = (
        messages.Accumulate(0, part.groups, part.members)
        for part in Batch(groups, members, parts).cut()
    )
    early = {
        "nothing": [],
        "the parts": [first, second],
        "one of them": [first],
        "other parts": [rest, first],
    }[said]
    found = [weights_after(config, tmp_path, lines) for lines in ([whole], [*early, whole])]
    (expected, _), (weights, heard) = found
    assert [m.parts for m in heard if isinstance(m, messages.Accumulated)] == [
        *range(1, len(early) + 1)
    ]
    assert [m.version for m in heard if isinstance(m, messages.BatchTrained)] == [0]
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def weights_after(config, directory: Path, said: list[messages.Message]):
    """Of a new learner over the run's log of before its first step."""
    log = directory / "events.db"
    reading = sqlite3.connect(Path(config.run.output_dir) / "events.db")
    log.unlink(missing_ok=True)
    reading.execute("VACUUM INTO ?", (str(log),))
    reading.close()
    writing = sqlite3.connect(log)
    writing.execute("DELETE FROM events WHERE kind = 'VersionPublished'")
    writing.commit()
    writing.close()
    connection = Script(*said, messages.Shutdown())
    learner = LearnerProcess(connection, config, directory)
    try:
        learner.serve()
        weights = {name: value.clone() for name, value in learner.learner.weights().items()}
    finally:
        learner.weights.close()
    return weights, connection.heard
