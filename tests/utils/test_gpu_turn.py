"""Turns at a GPU's memory: engines together or the learner alone, whoever dies."""

import os
import signal
import threading
import time

import pytest

from rhymeflow.utils import gpu_turn, progress
from rhymeflow.utils.gpu_turn import GpuTurn


@pytest.fixture
def engines(tmp_path):
    return [GpuTurn(tmp_path, is_learner=False) for _ in range(2)]


def test_a_learner_waits_for_all_engines_and_they_for_the_learner(tmp_path, engines):
    for each in engines:
        each.take()  # both at once
    learner, said, release = GpuTurn(tmp_path, is_learner=True), [], threading.Event()

    def learn():
        with learner.wanted():
            said.append("learner")
            release.wait(20)
            said.append("learned")

    thread = threading.Thread(target=learn, daemon=True)
    assert not engines[0].is_wanted
    thread.start()
    while not engines[0].is_wanted:
        time.sleep(0.01)
    before = progress.pieces
    engines[0].give()
    time.sleep(5 * gpu_turn._WAIT_SECONDS)
    assert not said, "one engine has its turn still"
    assert progress.pieces > before, "waiting would pass for a hang"
    engines[1].give()
    while not said:
        time.sleep(0.01)
    assert not engines[0].is_wanted
    threading.Timer(0.1, release.set).start()
    engines[0].take()
    assert said == ["learner", "learned"]
    thread.join()


def test_a_process_that_is_killed_gives_its_turn_back(tmp_path, engines):
    ready, told = os.pipe()
    if (child := os.fork()) == 0:
        with GpuTurn(tmp_path, is_learner=True).wanted():
            os.write(told, b"x")
            time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    engines[0].take()
