"""Logs whose decisions another version, or an edited strategy, would not have made."""

import random
from contextlib import closing
from dataclasses import replace

import pytest

from rhymeflow import build
from rhymeflow.core.coordinator import Coordinator
from rhymeflow.errors import UserError
from rhymeflow.runtime import snapshot
from rhymeflow.runtime.replay import replay
from rhymeflow.runtime.snapshot import StateSnapshot
from rhymeflow.store.previous_run import config_of
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.core import invariants
from tests.fake_run.run import SCHEDULE_NAMES, quiet_run

MOVES_LAYOUT = {"histopipe", "rhymeflow"}
"""Where a migration can name a new place in the layout, which the log does not have."""


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """By schedule: the configuration and the events of the first attempt at a fake run."""
    found = {}
    for schedule in SCHEDULE_NAMES:
        path = quiet_run(5, tmp_path_factory.mktemp(schedule), schedule).path / "events.db"
        with closing(TrajectoryReader(path)) as reader:
            first, *later = reader.attempts()
            until = later[0].first_event if later else 10**9
            events = [event for seq, _, event in reader.events() if seq < until]
            found[schedule] = config_of(first, path), events
    return found


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


def write_log(path, config, events, *, snapshot_after=None) -> None:
    """A log of these events, and of what is commanded upon them."""
    coordinator = Coordinator(build.plan(config), build.schedule(config))
    with closing(SqliteTrajectoryStore(path)) as store:
        store.begin_attempt(config.model_dump_json(), now=0.0, started="now")
        for number, event in enumerate(events, start=1):
            store.record(number / 10, [event])
            for command in coordinator.handle(event):
                store.record_command(number, command)
            if number == snapshot_after:
                store.put_snapshot(
                    number, snapshot.write(StateSnapshot(coordinator.state, 5, None))
                )
        store.commit()


def past_of(path):
    with closing(TrajectoryReader(path)) as reader:
        return replay(reader, path)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize("has_snapshot", [False, True])
def test_what_was_decided_stays_and_the_run_goes_on_from_it(
    tmp_path, monkeypatch, logs, schedule, has_snapshot
):
    config, events = logs[schedule]
    straight = Coordinator(build.plan(config), build.schedule(config))
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
        assert all("the log's decisions stay" in note for note in past.notes)
        invariants.check(past.coordinator.state)
        past.coordinator.state.schedule = build.schedule(config)
        gone_on = [past.coordinator.handle(event) for event in events[cut:]]
        if schedule not in MOVES_LAYOUT:
            assert gone_on == expected[cut:]
    assert differed or schedule == "synchronous"


def test_where_events_lead_to_something_else_it_is_refused(tmp_path, monkeypatch, logs):
    """How many members a group needs is no strategy: it says how groups end."""
    config, events = logs["staleflow"]
    write_log(tmp_path / "events.db", config, events)
    make = build.plan
    monkeypatch.setattr(
        build, "plan", lambda c: replace(make(c), num_generations=make(c).num_generations + 1)
    )
    with pytest.raises(UserError, match=r"(?s)cannot be resumed: .* resume with that$") as refused:
        past_of(tmp_path / "events.db")
    assert "(Rhymeflow 0.1.0" in str(refused.value), "who wrote it"
    assert len(str(refused.value).splitlines()) == 1


def test_a_state_of_other_classes_is_not_read(tmp_path, monkeypatch, logs):
    """Instead everything is replayed from the beginning."""
    config, events = logs["bounded"]
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "digest_of_classes", lambda: b"another version.")
        write_log(tmp_path / "events.db", config, events, snapshot_after=40)
    past = past_of(tmp_path / "events.db")
    assert past.coordinator.state.finished
    assert past.notes == (
        "the coordinator's state after event 40 was written by another version; all events from 1 "
        "on were replayed",
    )


def test_time_goes_on_from_the_last_event_also_if_nothing_is_replayed(tmp_path, logs):
    config, events = logs["bounded"]
    write_log(tmp_path / "events.db", config, events, snapshot_after=len(events))
    assert past_of(tmp_path / "events.db").seconds == len(events) / 10
