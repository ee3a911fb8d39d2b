"""Fake runs under faults: a few of those that `rhymeflow bench chaos_fake` does by the thousand."""

from __future__ import annotations

import random
import re
import shutil
import signal
from collections import Counter
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import chaos_fake
from rhymeflow.runtime import resume
from rhymeflow.runtime.in_flight import InFlight
from rhymeflow.runtime.reporting import Reporter
from rhymeflow.store import codec
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.writer import SqliteTrajectoryStore
from rhymeflow.workers.channel import Channel
from tests.fake_run import check, disk, runtime, workers
from tests.fake_run.models import HELD_OUT
from tests.fake_run.run import SCHEDULE_NAMES, FakeRun, configuration, run_with_faults
from tests.fake_run.runtime import Rates
from tests.fake_run.world import World

EXAMPLES = 30


@pytest.fixture
def place():
    """Makes directories, in memory where that can be."""
    made, new_folder = [], chaos_fake.new_folder

    def new():
        made.append(new_folder())
        return made[-1]

    yield new
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)


@settings(max_examples=EXAMPLES)
@given(st.integers(0, 2**32), st.sampled_from(SCHEDULE_NAMES))
def test_nothing_is_lost_or_done_twice_whatever_happens(seed, schedule):
    """Under any schedule, with whatever the seed draws: deaths, turns, suites, surplus, filters,
    other options after a death."""
    folder = chaos_fake.new_folder()
    try:
        run_with_faults(seed, folder, schedule, Counter(), chaos_fake.look if seed % 4 else None)
    finally:
        shutil.rmtree(folder)


def test_a_seed_gives_the_same_run(place):
    one, other = Counter(), Counter()
    run_with_faults(1, place(), "rhymeflow", one)
    run_with_faults(1, place(), "rhymeflow", other)
    assert one == other


def test_every_kind_of_fault_and_command_comes(place):
    counts, commanded, seed = Counter(), set(), 100
    while set(counts) != KINDS or commanded != set(codec.COMMANDS):
        assert seed < 160, (KINDS ^ set(counts), commanded ^ set(codec.COMMANDS))
        folder = place()
        run_with_faults(seed, folder, SCHEDULE_NAMES[seed % 7], counts)
        (log,) = folder.glob("*/events.db")
        with closing(TrajectoryReader(log)) as reader:
            commanded |= {kind for (kind,) in reader.query("SELECT DISTINCT kind FROM commands")}
        seed += 1


KINDS = {
    *(f"controller {how}" for how in ("signalled", "stopped", "killed, log cut")),
    *(f"controller killed, {what}" for what in ("log flushed", "unflushed lost")),
    *(f"{role} killed" for role in ("environment", "learner", "reward", "rollout")),
    *(f"{role} stopped" for role in ("environment", "learner", "reward", "rollout")),
    *("environment failed", "reward failed", "gradient not finite", "disk full", "log damaged"),
    *("messages late", "messages twice", "call dropped", "all, in runs of an agent"),
}


def test_tokens_are_never_stored_without_their_events(place, monkeypatch):
    """They were between the last command, as of a run that was stopped, and the end."""
    monkeypatch.setattr(workers.FakeSaver, "COMPLETED", 0.02)
    monkeypatch.setattr(runtime, "SIGNAL_SHARE", 1.0)
    commit, num_commits = SqliteTrajectoryStore.commit, Counter()

    def looked_at(self, *, durable=False):
        commit(self, durable=durable)
        with closing(TrajectoryReader(self.path)) as reader:
            assert reader.query(NOT_PROVED) == []
        num_commits["all"] += 1

    monkeypatch.setattr(SqliteTrajectoryStore, "commit", looked_at)
    for seed in range(7):
        run_with_faults(seed, place(), SCHEDULE_NAMES[seed], Counter())
    assert num_commits.total() > 100


NOT_PROVED = """SELECT DISTINCT instance, version FROM segments WHERE steps > 0 EXCEPT
    SELECT json_extract(body, '$.instance'), json_extract(body, '$.version') FROM events
    WHERE kind IN ('InstanceJoined', 'Pulled')"""


def test_answers_that_cannot_be_judged_are_counted_and_said(place, monkeypatch):
    warnings = []
    monkeypatch.setattr(Reporter, "warn", lambda self, text: warnings.append(text))
    config = configuration(random.Random(0), "synchronous")
    config = config.changed(data={"eval_size": HELD_OUT}, run={"eval_steps": 1})
    fake = FakeRun(World(0), place(), config, Rates(failures=0.3))
    fake.carry_through()
    check.ended(fake.path, fake.config, fake.seen)
    said = r"1 answers to suite held_out under version \d are not judged: .*: broken"
    assert any(re.fullmatch(said, warning) for warning in warnings), warnings


def test_two_signals_in_the_middle_of_storing_tear_nothing(place, monkeypatch):
    """The log had tokens without events, or commands without the events they were given upon."""
    record = SqliteTrajectoryStore.record
    left = num_ended = 0

    def signalled(self, now, events):
        nonlocal left
        left -= 1
        if left == 0:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
        return record(self, now, events)

    monkeypatch.setattr(SqliteTrajectoryStore, "record", signalled)
    for number in range(10, 110, 5):
        left = number
        config = configuration(random.Random(number), SCHEDULE_NAMES[number % 7])
        fake = FakeRun(World(number), place(), config)
        try:
            fake.carry_through()
        except KeyboardInterrupt:
            num_ended += 1
            assert left > -10, "it ended soon"
            fake.carry_through()
        check.ended(fake.path, fake.config, fake.seen)
    assert num_ended > 9


# -- it would be seen ------------------------------------------------------------------------------


def forgets_what_is_stored(monkeypatch):
    """What was in flight begins anew, beside what is stored of it."""
    restore = InFlight.restore

    def without_tokens(self, aborted):
        restore(self, aborted)
        for group in aborted:
            self[group].stored.clear()

    monkeypatch.setattr(InFlight, "restore", without_tokens)


def does_not_number_messages(monkeypatch):
    monkeypatch.setattr(
        Channel, "read", lambda self: self._connection.recv_bytes()[8:], raising=True
    )


def keeps_old_instances(monkeypatch):
    monkeypatch.setattr(resume, "_departures", lambda *_: iter(()))


def loses_what_it_committed(monkeypatch):
    class Loses(disk.MortalStore):
        def commit(self, *, durable=False):
            if self._last_seq % 3 == 2:
                self._transaction._rows.clear()
            super().commit(durable=durable)

    monkeypatch.setattr("tests.fake_run.run.MortalStore", Loses)


def stores_tokens_in_the_wrong_order(monkeypatch):
    put = SqliteTrajectoryStore.put_segment

    def reversed_tokens(self, trajectory, *, tokens, **rest):
        put(self, trajectory, tokens=tokens[::-1], **rest)

    monkeypatch.setattr(SqliteTrajectoryStore, "put_segment", reversed_tokens)


@pytest.mark.parametrize(
    "breaks",
    [
        forgets_what_is_stored,
        does_not_number_messages,
        keeps_old_instances,
        loses_what_it_committed,
        stores_tokens_in_the_wrong_order,
    ],
)
def test_a_defect_is_found_within_some_runs(place, monkeypatch, breaks):
    breaks(monkeypatch)
    counts, violations = Counter(), []
    monkeypatch.setattr(chaos_fake, "new_folder", place)
    for seed in range(14):
        chaos_fake.one_run(seed, counts, violations)
        if violations:
            return
    raise AssertionError("nobody noticed")
