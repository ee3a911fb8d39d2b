"""The transactions of a store's writer, and the file that it writes to.

Rows are collected and written statement by statement, at a fifth of the cost of row by row. Of the
rows between two commits, all are stored or none. After a disk fault nothing more is written, and
each attempt to write raises that fault again. After `close`, the one file is the whole store."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from rhymeflow.errors import StorageError, to_resume
from rhymeflow.store import schema
from rhymeflow.store.checkpoint_dirs import where_of
from rhymeflow.utils.disk import fault_of, flush

WAIT_SECONDS = 5.0  # How long `close` waits for readers. The run's own readers take milliseconds.


class Statement(StrEnum):
    """Statements that write rows, in the order in which a transaction executes them: an INSERT
    comes before the UPDATE of the same row. An UPDATE must find its row."""

    ATTEMPT = "INSERT INTO attempts VALUES (?, ?, ?, ?, ?)"
    CONFIG = "UPDATE attempts SET config = ? WHERE attempt = ?"
    GROUP = """INSERT INTO groups
        (group_id, row, epoch, prompt, prompt_tokens, columns, suite, evaluates)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"""
    SEGMENT = """INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
        ON CONFLICT DO UPDATE SET version = excluded.version, instance = excluded.instance,
        steps = excluded.steps, drafted = excluded.drafted,
        tokens = excluded.tokens, logprobs = excluded.logprobs, accepted = excluded.accepted
        WHERE length(excluded.tokens) > length(tokens)"""
    SPAN = "INSERT OR REPLACE INTO pruned VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
    FINISHED = """INSERT INTO trajectories (group_id, member, length, reason)
        VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE
        SET length = excluded.length, reason = excluded.reason"""
    TEXT = "UPDATE trajectories SET text = ? WHERE group_id = ? AND member = ?"
    REWARD = "UPDATE trajectories SET reward = ?, components = ? WHERE group_id = ? AND member = ?"
    TRAINED = "UPDATE trajectories SET trained = ? WHERE group_id = ? AND member = ?"
    ENDING = """UPDATE groups SET ending = ?, ending_version = ?, ending_reason = ?
        WHERE group_id = ?"""
    TOKEN_DETAILS = "INSERT OR REPLACE INTO token_details VALUES (?, ?, ?, ?)"
    EVENT = "INSERT INTO events VALUES (?, ?, ?, ?)"
    COMMAND = "INSERT INTO commands VALUES (?, ?, ?, ?)"
    SNAPSHOT = "INSERT OR REPLACE INTO snapshots VALUES (?, ?)"
    OLD_SNAPSHOTS = "DELETE FROM snapshots WHERE event < ?"
    CHANGE = "INSERT INTO changes (what, a, b) VALUES (?, ?, ?)"


class Transaction:
    """The open transaction of a store; a commit begins the next one."""

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        """See `schema.open_for_writing`."""
        self._path = path
        self.connection, self._lock = schema.open_for_writing(path, is_new=is_new)
        self._rows: dict[Statement, list[tuple[Any, ...]]] = {}
        self._file = OnDisk(path)
        self._fault: StorageError | None = None
        self._is_open = True

    def put(self, statement: Statement, *values: Any) -> None:
        """Collect the values of a row, for the next `write` or `commit`."""
        self._rows.setdefault(statement, []).append(values)

    def write(self) -> None:
        """Execute the collected rows, so that queries on `connection` see them."""
        with self._faults():
            self._execute()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Begin the transaction if it has not begun; the block may then write with `connection`."""
        with self._faults():
            self._begin()
            yield

    def commit(self, *, durable_seq: int | None = None) -> None:
        """End the transaction. With `durable_seq`, the number of the last event, it survives a loss
        of power. Raises `StorageError` if the disk is full, or the file was deleted or damaged."""
        with self._faults():
            self._file.check()
            self._execute()
            if self.connection.in_transaction:
                self.connection.execute("COMMIT")
            if durable_seq is not None:
                self._flush(durable_seq)

    def close(self) -> None:
        """Drop uncommitted rows and close the file, which is then complete without its `-wal`.
        After a disk fault, file and `-wal` may both be needed. A deleted file is written again."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            if self._file.is_missing:
                replace(self.connection, self._path)
            elif self._fault is None:
                make_whole(self.connection, self._path)
            else:
                with suppress(sqlite3.Error, OSError):  # the fault was raised already
                    make_whole(self.connection, self._path)
        finally:
            self.connection.close()
            os.close(self._lock)

    def close_if_missing(self) -> None:
        """Close the store if its file was deleted, which writes the file again."""
        if self._is_open and self._file.is_missing:
            self.close()

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Raise a disk fault as a `StorageError`, and again at each later attempt to write."""
        if self._fault is not None:
            raise self._fault
        try:
            yield
        except (sqlite3.Error, StorageError) as error:
            self._fault = fault_of(error, self._path.parent, self._path)
            if self._fault is None:
                raise
            self._rows.clear()
            with suppress(sqlite3.Error):  # the fault may have ended the transaction already
                self.connection.execute("ROLLBACK")
            raise self._fault from error

    def _flush(self, seq: int) -> None:
        # In WAL mode a commit at FULL flushes the whole journal, and with it the commits before,
        # which were written at NORMAL. The row in `meta` gives it something to commit.
        self.connection.execute("PRAGMA synchronous = FULL")
        self.connection.execute("INSERT OR REPLACE INTO meta VALUES ('durable_seq', ?)", (seq,))
        self.connection.execute("PRAGMA synchronous = NORMAL")

    def _begin(self) -> None:
        if not self.connection.in_transaction:
            self.connection.execute("BEGIN IMMEDIATE")

    def _execute(self) -> None:
        if self._rows:
            self._begin()
        for statement in Statement:
            rows = self._rows.pop(statement, None)
            if rows is None:
                continue
            try:
                changed = self.connection.executemany(statement, rows).rowcount
            except sqlite3.Error as error:
                error.add_note(f"while writing to {self._path}")
                raise
            assert not statement.startswith("UPDATE") or changed == len(rows), (
                f"{statement}: {len(rows)} rows were to change, and {changed} did"
            )


# -- the file --------------------------------------------------------------------------------------


def make_whole(connection: sqlite3.Connection, path: Path) -> None:
    """Move everything into the file at `path`, of which `connection` is the only writer.

    SQLite keeps the latest writes in `events.db-wal` until a checkpoint moves them into the file. A
    transaction that still reads an older state prevents that. This function waits for it, and if it
    does not end, replaces the file by a copy of the whole store.

    Raises:
        sqlite3.Error, OSError: there is no room for the copy. The whole store is then the file
            together with its `-wal`."""
    connection.execute(f"PRAGMA busy_timeout = {WAIT_SECONDS * 1000:.0f}")
    is_busy, in_wal, copied = connection.execute("PRAGMA wal_checkpoint(FULL)").fetchone()
    if not is_busy or in_wal == copied >= 0:  # both are -1 if the checkpoint could not begin
        connection.execute("PRAGMA busy_timeout = 0")  # the file is complete; do not wait
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return
    try:
        replace(connection, path)
    except (sqlite3.Error, OSError) as error:
        error.add_note(f"{path} has to be copied together with {path.name}-wal")
        raise


def replace(connection: sqlite3.Connection, path: Path) -> None:
    """Replace the file at `path` by a copy of the database of `connection`, and close that."""
    copy = path.with_name(f"{path.name}-copy")
    copy.unlink(missing_ok=True)
    target = sqlite3.connect(copy)
    try:
        connection.backup(target)
    finally:
        target.close()
    flush(copy)
    connection.close()
    os.replace(copy, path)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    flush(path.parent)


class OnDisk:
    """Detects that the file at `path` was deleted, replaced or cut short."""

    def __init__(self, path: Path) -> None:
        self._path, self._run_dir = path, path.parent
        status = path.stat()
        self._identity, self._size = (status.st_dev, status.st_ino), status.st_size

    @property
    def is_missing(self) -> bool:
        """Whether the file was deleted while its directory still exists."""
        return self._run_dir.is_dir() and not os.path.lexists(self._path)

    def check(self) -> None:
        """Raise `StorageError` if the file was deleted, replaced or cut short."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            if self._run_dir.is_dir():
                raise StorageError(
                    f"{self._path}: was deleted while the run was writing to it; the run still has "
                    f"it open and writes it again. To continue: {to_resume(self._run_dir)}"
                ) from None
            raise StorageError(
                f"{self._run_dir}: was deleted while the run was writing to it"
            ) from None
        if (status.st_dev, status.st_ino) != self._identity:
            raise StorageError(f"{self._path}: was replaced while the run was writing to it")
        if status.st_size < self._size:
            raise StorageError(
                f"{self._path}: was cut from {self._size:,} to {status.st_size:,} bytes while the "
                "run was writing to it; what is missing is lost. If you put a copy in its place, "
                f"{to_resume(self._run_dir)} continues; checkpoints are in "
                f"{where_of(self._run_dir)}"
            )
        self._size = status.st_size
