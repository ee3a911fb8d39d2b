"""A store that was closed is whole in `events.db` alone, whoever still reads it."""

from __future__ import annotations

import multiprocessing
import shutil
import sqlite3
import time
from pathlib import Path

import pytest

from rhymeflow.core.events import VersionPublished
from rhymeflow.store import transaction
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.writer import SqliteTrajectoryStore

SPAWN = multiprocessing.get_context("spawn")
BEFORE, AFTER = 10, 3000
"""Events that are stored when a reader opens, and those that come while it is there."""


def read(path: Path, how: str, pipe) -> None:
    """Be a reader that is connected, or in a transaction; say what it sees when asked."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
    if how != "connected":
        connection.execute("BEGIN")
    while True:
        pipe.send(connection.execute("SELECT COUNT(*) FROM events").fetchone()[0])
        if pipe.recv() == "end the transaction":
            connection.execute("COMMIT")


@pytest.fixture
def reader_of():
    started = []

    def start(path: Path, how: str):
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=read, args=(path, how, theirs), daemon=True)
        process.start()
        started.append(process)
        assert ours.poll(60)
        return process, ours

    yield start
    for process in started:
        process.kill()
        process.join()


def seen_alone(path: Path, elsewhere: Path) -> int:
    """Events in a copy of the file without what lies beside it."""
    elsewhere.mkdir()
    shutil.copy(path, elsewhere / path.name)
    reader = TrajectoryReader(elsewhere / path.name)
    assert reader.query("PRAGMA integrity_check") == [("ok",)]
    count = len(list(reader.events()))
    reader.close()
    return count


def grown(path: Path, count: int, store: SqliteTrajectoryStore | None = None):
    store = store or SqliteTrajectoryStore(path)
    store.record(0.0, [VersionPublished(version) for version in range(count)])
    store.commit()
    return store


@pytest.mark.parametrize("how", ["connected", "reading the newest", "reading an older state"])
def test_the_file_alone_is_whole_while_another_process_reads_it(
    tmp_path, monkeypatch, reader_of, how
):
    monkeypatch.setattr(transaction, "WAIT_SECONDS", 0.2)
    path = tmp_path / "events.db"
    store = grown(path, BEFORE)
    if how == "reading the newest":
        grown(path, AFTER, store)
        reader, pipe = reader_of(path, how)
    else:
        reader, pipe = reader_of(path, how)
        grown(path, AFTER, store)
    opened_with = pipe.recv()
    size, started = path.stat().st_size, time.monotonic()
    store.close()
    assert (time.monotonic() - started > 0.1) is (how == "reading an older state")
    assert path.stat().st_size > size, "all was there before"
    assert seen_alone(path, tmp_path / "alone") == BEFORE + AFTER
    assert {p.name for p in tmp_path.glob("*-copy")} == set()
    pipe.send("look again")
    assert pipe.recv() == (opened_with if how != "connected" else BEFORE + AFTER), "not disturbed"
    pipe.send("end the transaction" if how != "connected" else "look again")
    assert pipe.recv() == BEFORE + AFTER, "what it has open is whole, too"
    assert reader.is_alive()
    # A run that is resumed goes on in the file.
    grown(path, 5).close()
    assert seen_alone(path, tmp_path / "gone on") == BEFORE + AFTER + 5


def test_a_reader_that_ends_soon_is_waited_for(tmp_path, reader_of):
    path = tmp_path / "events.db"
    store = grown(path, BEFORE)
    _, pipe = reader_of(path, "reading an older state")
    assert pipe.recv() == BEFORE
    grown(path, AFTER, store)
    inode = path.stat().st_ino
    pipe.send("end the transaction")
    store.close()
    assert path.stat().st_ino == inode, "the file itself"
    assert seen_alone(path, tmp_path / "alone") == BEFORE + AFTER


def test_another_process_that_was_about_to_write_does_not_leave_it_short(tmp_path, monkeypatch):
    """Nobody should, but the file can be opened by whoever likes."""
    monkeypatch.setattr(transaction, "WAIT_SECONDS", 0.2)
    path = tmp_path / "events.db"
    store = grown(path, BEFORE)
    other = sqlite3.connect(path, isolation_level=None)
    grown(path, AFTER, store)
    other.execute("BEGIN IMMEDIATE")
    store.close()
    assert seen_alone(path, tmp_path / "alone") == BEFORE + AFTER
    other.close()


def test_a_log_that_is_being_read_leaves_no_transaction_open(tmp_path):
    path = tmp_path / "events.db"
    store = grown(path, BEFORE)
    reader = TrajectoryReader(path)
    log = reader.events()
    next(log)  # and whoever reads it works on that for long
    grown(path, AFTER, store)
    store.close()
    assert seen_alone(path, tmp_path / "alone") == BEFORE + AFTER
    assert len(list(log)) == BEFORE - 1, "to where it ended when it was opened"
