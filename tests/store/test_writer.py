"""The event store: order, whole ticks, idempotence, one writer and many readers."""

import itertools
import os
import re
import sqlite3
from contextlib import closing
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.core.commands import Pull
from rhymeflow.core.events import VersionPublished
from rhymeflow.core.types import TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.store import reader as reading
from rhymeflow.store.reader import IncompleteBatch, TrajectoryReader
from rhymeflow.store.schema import SCHEMA_VERSION
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.refused import refusal
from tests.store.stores import answered, finished, group, segment


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.db"


@pytest.fixture
def store(path):
    store = SqliteTrajectoryStore(path)
    yield store
    store.close()


def put_trajectory(store: SqliteTrajectoryStore, number: int, member: int, length: int = 4) -> None:
    """Store one whole response: two segments, under versions 0 and 1."""
    trajectory = TrajectoryId(number, member)
    tokens = [number * 1000 + member * 100 + i for i in range(length)]
    for start, end, version in ((0, length // 2, 0), (length // 2, length, 1)):
        logprobs = [-0.25 * i for i in range(start, end)]
        made = {"logprobs": logprobs, "start": start, "version": version}
        segment(store, trajectory, tokens[start:end], **made)
    finished(store, trajectory, length, 0.5, text="text", f=0.5)


# -- events ---------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9) | st.sampled_from(["commit", "close"]), max_size=12))
def test_a_log_is_what_was_committed_in_order_whoever_reads_it_when(tmp_path_factory, acts):
    path, put, kept = tmp_path_factory.mktemp("log") / "events.db", [], []
    store, reader = SqliteTrajectoryStore(path), TrajectoryReader(path)
    for time, act in enumerate([*acts, "commit"]):
        if act == "commit":
            store.commit()
            kept = list(put)
        elif act == "close":  # what was not committed is not there
            store.close()
            store, put = SqliteTrajectoryStore(path), list(kept)
        else:
            events = [VersionPublished(len(put) + each) for each in range(act)]
            first = store.record(float(time), events)
            assert first == len(put) + 1
            put += [(first + n, float(time), event) for n, event in enumerate(events)]
            for number in range(first, first + act):
                store.record_command(number, Pull("a", number, time))
            group(store, len(put))
        with patch.object(reading, "ROWS_AT_ONCE", 7):
            assert list(reader.events()) == kept
            found = [(number, event) for number, event, _ in reader.commands()]
        assert found == [(number, number) for number, *_ in kept]
        assert reader.query("SELECT COUNT(*) FROM groups") == [(len({t for _, t, _ in kept}),)]
    reader.close()
    store.close()


def test_a_durable_commit_marks_how_far_the_disk_is(store, path):
    store.record(0.0, [VersionPublished(1), VersionPublished(2)])
    store.commit(durable=True)
    found = TrajectoryReader(path).query("SELECT value FROM meta WHERE key = 'durable_seq'")
    assert found == [(2,)]
    assert store._connection.execute("PRAGMA synchronous").fetchone() == (1,)  # NORMAL again


# -- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("DELETE FROM groups", "group 0: its prompt is not stored"),
        ("DELETE FROM trajectories WHERE member = 1", "0.1: has not finished"),
        ("UPDATE trajectories SET reward = NULL WHERE member = 1", "0.1: has no reward"),
        ("DELETE FROM segments WHERE start = 0 AND member = 1", "next segment starts at 2"),
        ("DELETE FROM segments WHERE start = 2 AND member = 1", "2 tokens are stored of 4"),
    ],
)
def test_a_batch_has_the_order_asked_for_or_says_what_is_missing(store, path, damage, message):
    for number in (1, 0):
        group(store, number, prompt_tokens=[number, 7])
        for member in (0, 1):
            put_trajectory(store, number, member)
    store.commit()
    batch = TrajectoryReader(path).batch([1, 0], [(0,), (1, 0)])
    assert [(r.group, r.member) for r in batch] == [(1, 0), (0, 1), (0, 0)]
    assert (batch[0].prompt_ids, batch[0].completion_ids) == ([1, 7], [1000, 1001, 1002, 1003])
    assert (batch[0].reward, batch[0].reason) == (0.5, "stop")
    sqlite3.connect(path, isolation_level=None).execute(damage)
    with pytest.raises(IncompleteBatch, match=message):
        TrajectoryReader(path).batch([0], [(0, 1)])


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_segments_delivered_again_in_any_order_are_stored_once(tmp_path_factory, data):
    """Deliveries are prefixes of segments that grow; the last, whole ones are always among them.
    Log-probabilities come back to the bit."""
    directory = tmp_path_factory.mktemp("store")
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    bounds = list(itertools.accumulate(lengths, initial=0))
    whole = [(i, a, b) for i, (a, b) in enumerate(itertools.pairwise(bounds))]
    partial = data.draw(st.lists(st.sampled_from(whole), max_size=6))
    partial = [(i, a, data.draw(st.integers(a, b))) for i, a, b in partial]
    deliveries = data.draw(st.permutations(whole + partial))

    store = SqliteTrajectoryStore(directory / "events.db")
    group(store, 0)
    trajectory = TrajectoryId(0, 0)
    every = np.random.default_rng(0).normal(size=bounds[-1]).astype(np.float32)
    for version, start, end in deliveries:
        made = {"logprobs": every[start:end], "start": start, "version": version}
        segment(store, trajectory, range(start, end), **made)
    store.put_finished(trajectory, length=bounds[-1], reason="stop")
    store.put_finished(trajectory, length=bounds[-1], reason="stop")
    store.put_reward(trajectory, reward=1.0, components={})
    store.put_finished(trajectory, length=bounds[-1], reason="stop")  # late: reward stays
    store.commit()
    reader = TrajectoryReader(directory / "events.db")
    (record,) = reader.batch([0], [(0,)])
    assert record.completion_ids == list(range(bounds[-1]))
    assert record.logprobs == every.tolist()
    assert record.versions == [v for v, a, b in whole for _ in range(a, b)]
    assert reader.query("SELECT COUNT(*) FROM segments") == [(len(whole),)]
    reader.close()
    store.close()


def test_members_that_a_consumed_group_did_not_need_count_as_aborted(store, path):
    for number in (0, 1, 2):
        group(store, number)
        put_trajectory(store, number, 0)
        put_trajectory(store, number, 1)
        segment(store, TrajectoryId(number, 2), [1], version=5)
    store.put_consumed(0, version=3, members=[1])
    store.put_ending(1, "filtered", version=3, reason="all rewards are equal")
    store.commit()
    reader = TrajectoryReader(path)
    rows = reader.query("SELECT group_id, member, length, trained, ending FROM responses")
    assert rows == [
        (0, 0, 4, None, "aborted"),
        (0, 1, 4, 3, "consumed"),
        (0, 2, 1, None, "aborted"),
        *[(1, member, length, None, "filtered") for member, length in ((0, 4), (1, 4), (2, 1))],
        *[(2, member, length, None, None) for member, length in ((0, 4), (1, 4), (2, 1))],
    ]
    found = reader.query("SELECT group_id, member, version, first_version, staleness FROM trained")
    assert found == [(0, 1, 3, 0, 3)]


@pytest.mark.parametrize(
    "put",
    [
        lambda store: store.put_reward(TrajectoryId(0, 7), reward=1.0, components={}),
        lambda store: store.put_consumed(0, version=0, members=[0, 7]),
        lambda store: store.put_ending(7, "aborted", version=0, reason="why"),
    ],
    ids=["a reward", "trained on", "an ending"],
)
def test_what_is_not_there_has_no_reward_and_no_ending(store, put):
    group(store, 0)
    put_trajectory(store, 0, 0)
    put(store)
    with pytest.raises(AssertionError, match="were to change"):
        store.commit()


def test_what_is_not_committed_is_read_by_its_writer(store, path):
    group(store, 0, row=100)
    put_trajectory(store, 0, 0)
    assert store.origin(0) == (100, 0)
    assert TrajectoryReader(path).query("SELECT * FROM segments") == []


def test_time_in_the_server_is_counted(store):
    before = store.seconds
    store.record(0.0, [VersionPublished(1)] * 1000)
    assert 0 < store.seconds - before < 10


def test_an_evaluation_that_is_over_is_seen_as_such_and_as_nothing_else(store, path):
    for _ in range(2):
        answered(store, -2, [1.0, 0.5], suite="math", row=7, version=3)
    group(store, -3, row=0, suite="math", version=4)
    store.commit()
    assert store.suite_groups() == (-3, {-3: ("math", 4)})
    assert store.endings() == {}
    reader = TrajectoryReader(path)
    found = reader.query("SELECT version, suite, row, sample, reward FROM evaluations")
    assert found == [(3, "math", 7, 0, 1.0), (3, "math", 7, 1, 0.5)]
    assert not any(reader.query(f"SELECT * FROM {view}") for view in ("responses", "spans"))


# -- what is refused ------------------------------------------------------------------------------


def test_a_second_writer_is_refused(store, path):
    with pytest.raises(UserError, match=f"process {os.getpid()} on .* is writing to this run"):
        SqliteTrajectoryStore(path)


def test_a_reader_cannot_write(store, path):
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        TrajectoryReader(path).query("DELETE FROM events")


@pytest.mark.parametrize("opened", [SqliteTrajectoryStore, TrajectoryReader])
def test_other_files_and_databases_are_refused(path, opened):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE birds (name)")
    assert "not an event store of Rhymeflow" in refusal(opened, path)
    path.write_text("not a database, but long enough to look like a file of some kind" * 20)
    assert "events.db: cannot be opened as an event store" in refusal(opened, path)


@pytest.mark.parametrize("opened", [SqliteTrajectoryStore, TrajectoryReader])
@pytest.mark.parametrize(
    ("schema", "writer", "advice"),
    [
        (99, "Rhymeflow 7.1", r"Rhymeflow 7\.1 wrote it: install that version"),
        (15, None, "an earlier Rhymeflow wrote it: install that version"),
    ],
)
def test_another_schema_version_is_refused(path, opened, schema, writer, advice):
    SqliteTrajectoryStore(path).close()
    values = {"schema_version": schema, "written_by": writer}
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())
    said = (
        rf"has schema version {schema}, and this .* \(0\.1\.0.*\) reads {SCHEMA_VERSION}; {advice}"
    )
    assert re.search(said, refusal(opened, path))


def test_missing_places_are_named(tmp_path):
    with pytest.raises(UserError, match="nowhere: no such directory"):
        SqliteTrajectoryStore(tmp_path / "nowhere" / "events.db")
    assert "no such file" in refusal(TrajectoryReader, tmp_path / "events.db")


def test_an_archive_that_cannot_be_written_is_read(path, monkeypatch):
    store = SqliteTrajectoryStore(path)
    store.record(0.0, [VersionPublished(1)])
    store.commit()
    store.close()
    assert sorted(p.name for p in path.parent.iterdir()) == ["events.db", "writer.lock"]
    monkeypatch.setattr(os, "access", lambda *_: False)
    reader = TrajectoryReader(path)
    assert [r.event for r in reader.events()] == [VersionPublished(1)]
    assert sorted(p.name for p in path.parent.iterdir()) == ["events.db", "writer.lock"]
