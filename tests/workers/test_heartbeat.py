"""A worker says that it lives whatever it does, and how far it is."""

import multiprocessing
import threading
import time

import pytest

from rhymeflow.utils import progress
from rhymeflow.workers import entry, messages
from rhymeflow.workers.channel import Channel
from rhymeflow.workers.entry import beating
from rhymeflow.workers.messages import Alive, RewardComputed, decode, receive, send
from tests.learner.builders import made_up_batch, tiny_learner


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(entry, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(messages, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(progress, "has_started", False)


@pytest.fixture
def ends():
    one, other = multiprocessing.Pipe()
    yield Channel(one), Channel(other)
    one.close()
    other.close()


def heard(channel: Channel, count: int) -> list[int]:
    # Not by `receive`: waiting is progress, and this is one process.
    found = [decode(channel.recv_bytes()) for _ in range(count)]
    assert all(isinstance(each, Alive) for each in found)
    return [each.progress for each in found]


def test_it_beats_while_the_main_thread_is_stuck_and_the_number_stands_still(ends):
    ours, theirs = ends
    stuck = threading.Event()

    def main() -> None:
        with beating(theirs):
            progress.has_started = True
            progress.advance()
            stuck.wait()

    worker = threading.Thread(target=main)
    worker.start()
    heard(ours, 3)  # it may not have been stuck yet
    last = heard(ours, 5)
    stuck.set()
    worker.join()
    assert len(set(last[1:])) == 1


def test_before_it_serves_a_sign_of_life_is_progress_for_a_while(ends, monkeypatch):
    ours, theirs = ends
    monkeypatch.setattr(entry, "START_SECONDS", 0.1)
    with beating(theirs):
        found = heard(ours, 4)
        assert found == sorted(set(found))
        time.sleep(0.2)
        found = heard(ours, 60)
    assert len(set(found[-5:])) == 1


def test_waiting_for_a_message_is_progress(ends):
    ours, theirs = ends
    before = progress.pieces
    threading.Timer(0.1, send, (theirs, Alive(7))).start()
    assert receive(ours) == Alive(7)
    assert progress.pieces > before


def test_a_micro_batch_is_progress():
    learner = tiny_learner(max_tokens_per_microbatch=33, num_minibatches=2)
    before = progress.pieces
    learner.train(made_up_batch(), 0)
    assert progress.pieces - before > 4


def test_two_threads_send_whole_messages(ends):
    ours, theirs = ends
    long = RewardComputed("x", ["y" * 100_000], [{}])

    def main() -> None:
        for _ in range(100):
            send(theirs, long)

    with beating(theirs):
        worker = threading.Thread(target=main)
        worker.start()
        found = []
        while len(found) < 100:
            message = receive(ours)
            found += [message] if message != Alive(getattr(message, "progress", 0)) else []
        worker.join()
    assert found == [long] * 100
