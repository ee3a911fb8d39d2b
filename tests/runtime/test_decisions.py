"""Logs whose decisions another version, or an edited strategy, would not have made."""

from __future__ import annotations

import io
import random
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
from rich.console import Console

from rhymeflow import build
from rhymeflow.core.commands import Train
from rhymeflow.core.coordinator import Coordinator
from rhymeflow.errors import UserError
from rhymeflow.runtime import snapshot
from rhymeflow.runtime import train as runtime
from rhymeflow.runtime.replay import replay
from rhymeflow.runtime.snapshot import Snapshot
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.core import invariants
from tests.core.test_replay import LOGS, recorded
from tests.runtime.test_resume import audit, small, tokens, train_until

ids = [path.name.split(".")[0] for path in LOGS]
MOVES_LAYOUT = {"histopipe", "rhymeflow"}
"""Where a migration can name a new place in the layout, which the log does not have."""


def other_strategies(monkeypatch) -> None:
    """Routing takes what waits in the opposite order, nothing is pulled, nothing migrates."""
    make = build.schedule

    def schedule(config):
        known = make(config)
        return replace(
            known,
            routing=lambda view: list(known.routing(view))[::-1],
            sync=lambda instance, view: False,
            migration=lambda view: (),
        )

    monkeypatch.setattr(build, "schedule", schedule)


def write_log(path, config, events, *, num_commands=None, snapshot_after=None) -> list:
    """A log of these events, with the first commands; returns all, by event."""
    coordinator = Coordinator(build.plan(config), build.schedule(config))
    store = SqliteTrajectoryStore(path)
    store.begin_attempt(config.model_dump_json(), now=0.0, started="now")
    given, left = [], num_commands
    for number, event in enumerate(events, start=1):
        store.record(number / 10, [event])
        given.append(coordinator.handle(event))
        for command in given[-1]:
            if left is None or left > 0:
                store.record_command(number, command)
            left = left and left - 1
        if number == snapshot_after:
            store.put_snapshot(number, snapshot.write(Snapshot(coordinator.state, 5, None)))
    store.commit()
    store.close()
    return given


def past_of(path):
    reader = TrajectoryReader(path)
    try:
        return replay(reader, path)
    finally:
        reader.close()


@pytest.mark.parametrize("log", LOGS, ids=ids)
@pytest.mark.parametrize("has_snapshot", [False, True])
def test_what_was_decided_stays_and_the_run_goes_on_from_it(
    tmp_path, monkeypatch, log, has_snapshot
):
    config, events = recorded(log)
    plan, schedule = build.plan(config), build.schedule(config)
    straight = Coordinator(plan, schedule)
    expected = [straight.handle(event) for event in events]
    differed = 0
    for cut in sorted(random.Random(0).sample(range(len(events) // 4, len(events)), 3)):
        path = tmp_path / f"{cut}.db"
        write_log(path, config, events[:cut], snapshot_after=cut // 2 if has_snapshot else None)
        with monkeypatch.context() as patch:
            other_strategies(patch)
            past = past_of(path)
        assert past.unrecorded == ()
        differed += len(past.notes)
        assert all("what was decided stays" in note for note in past.notes)
        invariants.check(past.coordinator.state)
        past.coordinator.state.schedule = schedule
        gone_on = [past.coordinator.handle(event) for event in events[cut:]]
        if ids[LOGS.index(log)] not in MOVES_LAYOUT:
            assert gone_on == expected[cut:]
    assert differed or "synchronous" in log.name


@pytest.mark.parametrize("log", LOGS, ids=ids)
def test_a_log_that_lacks_its_last_commands(tmp_path, monkeypatch, log):
    """What the log does not have was not decided; what follows from events is to be done."""
    config, events = recorded(log)
    train = next(
        number
        for number, commands in enumerate(write_log(tmp_path / "whole.db", config, events))
        if any(isinstance(command, Train) for command in commands)
    )
    events = events[: train + 1]
    commands = write_log(tmp_path / "all.db", config, events)
    before = sum(map(len, commands[:train]))
    index = next(i for i, c in enumerate(commands[train]) if isinstance(c, Train))
    write_log(tmp_path / "cut.db", config, events, num_commands=before + index)
    other_strategies(monkeypatch)
    past = past_of(tmp_path / "cut.db")
    assert past.unrecorded[0] == (train + 1, commands[train][index])
    assert past.training == commands[train][index]
    invariants.check(past.coordinator.state)


def test_where_events_lead_to_something_else_it_is_refused(tmp_path, monkeypatch):
    """The filter of groups without variance is no strategy: it says how groups end."""
    config, events = recorded(LOGS[ids.index("staleflow")])
    write_log(tmp_path / "events.db", config, events)
    make = build.plan
    monkeypatch.setattr(
        build,
        "plan",
        lambda config: replace(make(config), filter_zero_variance=True, max_filtered=9),
    )
    with pytest.raises(UserError, match=r"(?s)cannot be resumed: .* resume with that$") as refused:
        past_of(tmp_path / "events.db")
    assert "(Rhymeflow 0.1.0" in str(refused.value), "who wrote it"
    assert len(str(refused.value).splitlines()) == 1


def test_a_state_of_other_classes_is_not_read(tmp_path, monkeypatch):
    """Instead everything is replayed from the beginning."""
    config, events = recorded(LOGS[0])
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "digest_of_classes", lambda: b"another version.")
        write_log(tmp_path / "events.db", config, events, snapshot_after=40)
    past = past_of(tmp_path / "events.db")
    assert past.coordinator.state.finished
    assert past.notes == (
        "the coordinator's state after event 40 was written by another version; all events from 1 "
        "on were replayed",
    )


def test_time_goes_on_from_the_last_event_also_if_nothing_is_replayed(tmp_path):
    config, events = recorded(LOGS[0])
    write_log(tmp_path / "events.db", config, events, snapshot_after=len(events))
    assert past_of(tmp_path / "events.db").seconds == len(events) / 10


def test_the_digest_tells_of_a_field_more(monkeypatch):
    from rhymeflow.core.protocol.group import Member

    before = snapshot.digest_of_classes.__wrapped__()
    assert snapshot.digest_of_classes.__wrapped__() == before
    monkeypatch.setitem(Member.__annotations__, "one_more", "int")
    assert snapshot.digest_of_classes.__wrapped__() != before


@pytest.mark.slow
def test_a_run_goes_on_under_strategies_that_decide_otherwise(tmp_path, monkeypatch):
    config = small(
        tmp_path,
        schedule={"name": "staleflow", "max_staleness": 2},
        rollout={"num_instances": 2, "max_completion_length": 40},
    )
    train_until(monkeypatch, config, lambda c: c.training.published == 5)
    before = tokens(tmp_path / "run")
    reader = TrajectoryReader(tmp_path / "run" / "events.db")
    commands = list(reader.commands())
    reader.close()
    log = sqlite3.connect(tmp_path / "run" / "events.db")
    # Since one that was taken with a checkpoint there may be nothing to decide otherwise.
    with closing(log), log:
        log.execute("DELETE FROM snapshots")
    with monkeypatch.context() as patch:
        make = build.schedule

        def schedule(config):
            known = make(config)
            return replace(known, routing=lambda view: list(known.routing(view))[::-1])

        patch.setattr(build, "schedule", schedule)
        said = io.StringIO()
        console = Console(file=said, width=10_000)
        assert runtime.resume(tmp_path / "run", console=console).steps == 6
    assert "warning: this version decides otherwise than the log" in said.getvalue()
    after = tokens(tmp_path / "run")
    assert all(after[key].startswith(made) for key, made in before.items()), "tokens were lost"
    audit(tmp_path / "run")
    reader = TrajectoryReader(tmp_path / "run" / "events.db")
    assert list(reader.commands())[: len(commands)] == commands
    assert replay(reader, tmp_path / "run" / "events.db").notes == (), "it begins after the change"
    reader.close()
