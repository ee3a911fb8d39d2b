"""A store that was closed is whole in `events.db` alone, whoever still reads it."""

import shutil
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from rhymeflow.core.events import VersionPublished
from rhymeflow.store import transaction
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.writer import SqliteTrajectoryStore

BEFORE, AFTER = 10, 3000
"""Events that are stored when a reader opens, and those that come while it is there."""


def connected(path: Path, *, begins: bool = False) -> sqlite3.Connection:
    """A reader, perhaps in a transaction, which sees what is stored now until it ends."""
    uri = f"file:{path}?mode=ro"
    reader = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    if begins:
        reader.execute("BEGIN")
    count(reader)
    return reader


def count(reader: sqlite3.Connection) -> int:
    return reader.execute("SELECT COUNT(*) FROM events").fetchone()[0]


def seen_alone(path: Path, elsewhere: Path) -> int:
    """Events in a copy of the file without what lies beside it."""
    elsewhere.mkdir()
    shutil.copy(path, elsewhere / path.name)
    reader = TrajectoryReader(elsewhere / path.name)
    assert reader.query("PRAGMA integrity_check") == [("ok",)]
    found = len(list(reader.events()))
    reader.close()
    return found


def grown(path: Path, number: int, store: SqliteTrajectoryStore | None = None):
    store = store or SqliteTrajectoryStore(path)
    store.record(0.0, [VersionPublished(version) for version in range(number)])
    store.commit()
    return store


@pytest.mark.parametrize("how", ["connected", "reading the newest", "reading an older state"])
def test_the_file_alone_is_whole_while_it_is_read(tmp_path, monkeypatch, how):
    monkeypatch.setattr(transaction, "WAIT_SECONDS", 0.2)
    path, begins = tmp_path / "events.db", how != "connected"
    store = grown(path, BEFORE)
    if how == "reading the newest":
        grown(path, AFTER, store)
        reader = connected(path, begins=True)
    else:
        reader = connected(path, begins=begins)
        grown(path, AFTER, store)
    seen, size, started = count(reader), path.stat().st_size, time.monotonic()
    store.close()
    assert (time.monotonic() - started > 0.1) is (how == "reading an older state")
    assert path.stat().st_size > size, "all was there before"
    assert seen_alone(path, tmp_path / "alone") == BEFORE + AFTER
    assert not list(tmp_path.glob("*-copy"))
    assert count(reader) == seen, "not disturbed"
    if begins:
        reader.execute("COMMIT")
    assert count(reader) == BEFORE + AFTER, "what it has open is whole, too"
    # A run that is resumed goes on in the file.
    grown(path, 5).close()
    assert seen_alone(path, tmp_path / "gone on") == BEFORE + AFTER + 5
    reader.close()


def test_a_reader_that_ends_soon_is_waited_for(tmp_path):
    path = tmp_path / "events.db"
    store = grown(path, BEFORE)
    reader = connected(path, begins=True)
    grown(path, AFTER, store)
    inode = path.stat().st_ino
    threading.Timer(0.3, reader.execute, ["COMMIT"]).start()
    store.close()
    assert path.stat().st_ino == inode, "the file itself"
    assert seen_alone(path, tmp_path / "alone") == BEFORE + AFTER


def test_neither_a_log_that_is_being_read_nor_another_writer_leaves_it_short(tmp_path, monkeypatch):
    """Nobody else should write, but the file can be opened by whoever likes."""
    monkeypatch.setattr(transaction, "WAIT_SECONDS", 0.2)
    path = tmp_path / "events.db"
    store = grown(path, BEFORE)
    log = TrajectoryReader(path).events()
    next(log)  # and whoever reads it works on that for long
    grown(path, AFTER, store)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store.close()
    assert seen_alone(path, tmp_path / "alone") == BEFORE + AFTER
    assert len(list(log)) == BEFORE - 1, "to where it ended when it was opened"
    other.close()
