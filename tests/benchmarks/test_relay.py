"""Messages of real pipes that come twice and late, and a real run that does not mind."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import partial

import pytest

from benchmarks.faults import entry, relay
from benchmarks.training.train import ROOT
from rhymeflow.runtime.local import LocalWorker
from rhymeflow.workers.channel import Channel
from tests.runtime.logs import check_bound, check_replay, train
from tests.runtime.tiny import tiny_config

MESSAGES = [b"%d" % number * (1 + number % 50) for number in range(300)]


@pytest.fixture
def counts(monkeypatch):
    monkeypatch.setattr(relay, "TWICE", 0.3)
    monkeypatch.setattr(relay, "LATE", 0.02)
    monkeypatch.setattr(relay, "DELAY_SECONDS", (0.005, 0.02))
    return Counter()


@pytest.fixture
def ends(counts):
    def note(what, count):
        counts[what] += count

    found = relay.unreliable_pipe(random.Random(0), note)
    yield found
    for end in found:
        end.close()


def all_of(end):
    """What arrives until the other end is closed."""
    channel, found = Channel(end), []
    with suppress(EOFError, ConnectionResetError):
        while True:
            found.append(channel.recv_bytes())
    return found


def test_both_directions_arrive_whole_and_once(ends, counts):
    channels = [Channel(end) for end in ends]
    heard: list[list[bytes]] = [[], []]

    def hear(side):
        heard[side] += [channels[side].recv_bytes() for _ in MESSAGES]

    threads = [threading.Thread(target=hear, args=(side,), daemon=True) for side in (0, 1)]
    for thread in threads:
        thread.start()
    for message in MESSAGES:
        for channel in channels:
            channel.send_bytes(message)
    for thread in threads:
        thread.join(timeout=30)
    assert heard == [MESSAGES, MESSAGES]
    assert counts["twice"] > 100
    assert counts["late"] > 3


@pytest.mark.parametrize("closing", [0, 1])
def test_the_end_of_one_side_is_heard_after_all_that_it_said(ends, closing):
    def say():
        channel = Channel(ends[closing])
        for message in MESSAGES:
            channel.send_bytes(message)
        ends[closing].close()

    threading.Thread(target=say, daemon=True).start()
    assert all_of(ends[1 - closing]) == MESSAGES


def test_who_sends_to_an_end_that_is_gone_is_told(ends):
    ends[1].close()
    channel = Channel(ends[0])
    deadline = time.monotonic() + 30

    def say():
        while time.monotonic() < deadline:
            channel.send_bytes(b"?")

    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        say()


@pytest.mark.slow
def test_a_run_does_nothing_twice(tmp_path, counts, monkeypatch):
    def note(what, count):
        counts[what] += count

    pipe = partial(relay.unreliable_pipe, random.Random(0), note)
    monkeypatch.setattr(LocalWorker, "pipe", staticmethod(pipe))
    config = tiny_config(tmp_path, rollout={"num_instances": 2})
    assert train(config).steps == config.learner.max_steps
    check_replay(config)
    check_bound(config)
    audit = [sys.executable, ROOT / "examples" / "audit_run.py", tmp_path / "run"]
    done = subprocess.run(audit, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert counts["twice"] > 20


def test_the_command_keeps_an_account(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(LocalWorker, "pipe", LocalWorker.pipe)  # to be given back
    account = tmp_path / "messages"
    assert entry.main(["7", str(account), "recipes"]) == 0
    ours, theirs = LocalWorker.pipe()
    for _ in range(500):
        ours.send_bytes(b"?")
        theirs.recv_bytes()
    ours.close()
    assert entry.counted(account)["twice"] > 0
    assert entry.counted(tmp_path / "none") == {}
