"""The learner's process: what it reads of the log, and what it says of checkpoints."""

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from rhymeflow.config import Config
from rhymeflow.core.events import Accumulated, VersionPublished
from rhymeflow.errors import StorageError, UserError
from rhymeflow.learner.checkpoint import Saved
from rhymeflow.store.reader import TrajectoryReader, TrajectoryRecord
from rhymeflow.store.writer import SqliteTrajectoryStore
from rhymeflow.weights.proof import as_text
from rhymeflow.weights.publish import BegunPublication
from rhymeflow.workers import learner as learners
from rhymeflow.workers.channel import Channel
from rhymeflow.workers.learner import LearnerProcess
from rhymeflow.workers.messages import (
    CheckpointEnded,
    Publish,
    SaveCheckpoint,
    Shutdown,
    receive,
    send,
)
from rhymeflow.workers.restore import samples, skipped_in_a_row
from tests.runtime.tiny import save_model


@pytest.mark.parametrize(
    ("reason", "truncated"),
    [("stop", False), ("max_turns", False), ("length", True), ("finished_early", True)],
)
def test_truncated_is_what_the_policy_did_not_end(reason, truncated):
    record = TrajectoryRecord(0, 0, [1], [2], [-1.0], [0], 1.0, reason, {}, [False])
    assert [each.truncated for each in samples([record], Config())] == [truncated]


def test_skipped_steps_in_a_row_are_counted_in_each_attempt_anew(tmp_path):
    with closing(SqliteTrajectoryStore(tmp_path / "events.db")) as store:
        for skipped, expected in (([], 0), ([0], 1), ([0, 1], 2), ([], 0), ([1], 1)):
            version = store._last_seq + 1
            store.record(0.0, [VersionPublished(version, "", tuple(skipped))])
            store.commit()
            with closing(TrajectoryReader(store.path)) as reader:
                assert skipped_in_a_row(reader) == expected
        store.begin_attempt(Config().model_dump_json(), now=0.0, started="later")
        store.commit()
        with closing(TrajectoryReader(store.path)) as reader:
            assert skipped_in_a_row(reader) == 0


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (None, r"run\.output_dir: there is no .*gone on .*: the learner saves there"),
        ("s3://bucket/run", r"run\.checkpoint_dir: s3://bucket/run: Install s3fs"),
        ("shared", r"run\.checkpoint_dir: on .*, those in shared are of no run"),
    ],
)
def test_a_node_without_the_place_of_checkpoints_says_so_before_it_loads(
    tmp_path, monkeypatch, where, said
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LearnerProcess, "_load", None)
    config = Config(run={"checkpoint_dir": where})
    with closing(SqliteTrajectoryStore(tmp_path / "events.db")) as store:
        store.begin_attempt(config.model_dump_json(), now=0.0, started="now")
        store.commit()
        reader = TrajectoryReader(store.path)
        monkeypatch.setattr(learners, "store_reader", lambda *_: reader)
        with closing(reader), pytest.raises((UserError, StorageError), match=said):
            LearnerProcess(None, config, tmp_path / "gone")


def test_the_template_that_was_given_goes_into_checkpoints(tmp_path):
    model, file = save_model(tmp_path / "model"), tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    config = Config(model={"name": str(model)}, data={"chat_template": str(file)})
    process = LearnerProcess.__new__(LearnerProcess)
    process.config = config
    learner = process._load(torch.device("cpu"), torch.float32)
    assert learner.snapshot()._tokenizer.chat_template == file.read_text()


def test_a_learner_that_is_never_idle_says_which_checkpoints_are_complete():
    """A backup, a snapshot and what may be deleted wait for that."""
    ours, theirs = multiprocessing.Pipe()
    learner = LearnerProcess.__new__(LearnerProcess)
    learner.connection = theirs
    written = [Saved(3, Path("step-3"), None)]
    learner._saver = SimpleNamespace(is_busy=True, ended=lambda: [written.pop()])
    send(ours, Shutdown())
    learner.turn()
    assert ours.poll()
    assert receive(ours) == CheckpointEnded(3, "step-3")


class SlowWeights:
    """Of a GPU: `finish` waits until `are_there`, and fails as it is told."""

    metrics: ClassVar = {"params/changed_share": 0.5}

    def __init__(self):
        self.are_there, self.copied, self.error = threading.Event(), object(), None

    def begin(self, rows):
        return BegunPublication(None, None, self.copied)

    def finish(self, version, begun):
        assert self.are_there.wait(10)
        assert begun.copied is self.copied
        if self.error is not None:
            raise self.error
        return 5


@pytest.fixture
def publishing():
    """A learner whose weights are on their way, and the other end of its connection."""
    ours, theirs = (Channel(each) for each in multiprocessing.Pipe())
    process = LearnerProcess.__new__(LearnerProcess)
    process.connection, process.version, process.weights = theirs, 3, SlowWeights()
    process.learner = SimpleNamespace(rows=dict, skipped={1: "it is nan"}, copied=None)
    process._saver = SimpleNamespace(is_busy=True, ended=list, begin=lambda *_: None)
    process._publisher = ThreadPoolExecutor(1)
    send(ours, Publish(3))
    process.turn()
    assert receive(ours) == Accumulated(3, 0)
    assert process.learner.copied is process.weights.copied
    assert not ours.poll(0.05)
    return process, ours


def test_the_next_batch_begins_while_a_gpu_copies_the_weights(publishing):
    process, ours = publishing
    process.turn()  # as for any message
    process.weights.are_there.set()
    found = receive(ours)
    assert found.what == VersionPublished(3, as_text(5), (1,), "it is nan")
    assert found.data.metrics == SlowWeights.metrics


def test_a_checkpoint_waits_for_the_weights(publishing):
    process, ours = publishing
    found = []
    process.learner.snapshot = lambda: found.append(ours.poll())
    send(ours, SaveCheckpoint(()))
    threading.Timer(0.05, process.weights.are_there.set).start()
    process.turn()
    assert found == [True]


def test_what_fails_while_weights_are_published_ends_the_learner(publishing):
    process, _ = publishing
    process.weights.error = RuntimeError("a rank is gone")
    process.weights.are_there.set()
    wait([process._published])
    with pytest.raises(RuntimeError, match="a rank is gone"):
        process.turn()
