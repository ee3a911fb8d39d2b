"""What a worker process finds when it begins."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import pytest

from rhymeflow.config import Config
from rhymeflow.errors import UserError
from rhymeflow.runtime import process
from rhymeflow.runtime.process import Worker, share_of_cores


@pytest.fixture(autouse=True)
def spawned(monkeypatch):
    """As in a real run."""
    monkeypatch.setattr(process, "multiprocessing", multiprocessing)


@pytest.mark.parametrize("num_threads", [1, 2])  # torch takes no more than there are cores
def test_a_worker_has_the_threads_it_was_given(tmp_path, num_threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    entry = "tests.runtime.threads_entry"
    worker = Worker("w", entry, Config(), str(tmp_path), num_threads=num_threads, cpus=None)
    assert os.environ["OMP_NUM_THREADS"] == "3", "the controller's own environment stays"
    try:
        assert worker.connection.poll(60)
        with pytest.raises(UserError, match=rf"^{num_threads} threads"):
            list(worker.messages(0.0))
    finally:
        worker.stop(patience=5.0)


def test_cores_are_shared_out():
    cores = len(os.sched_getaffinity(0))
    assert share_of_cores(1) == cores
    assert share_of_cores(10 * cores) == 1


def test_nothing_is_delivered_once_a_worker_is_stopped(tmp_path, monkeypatch):
    """Its descriptor's number may be another's by then, who would be told to shut down."""
    written = []

    def slowly(self, message):
        time.sleep(0.5)
        assert not self.closed
        written.append(message)

    monkeypatch.setattr(Connection, "send_bytes", slowly)
    worker = Worker("w", "tests.runtime.threads_entry", Config(), str(tmp_path), num_threads=1,
                    cpus=None)  # fmt: skip
    worker.stop(patience=0.0)
    count = len(written)
    time.sleep(1.0)
    assert len(written) == count == 1
