"""What the writer of a store has put and not committed yet, and the file that it goes to.

Rows are kept and written at once, statement by statement: a fifth of what row by row would cost.
Everything between two commits is there whole or not at all; after a fault of the disk nothing more
is written, and each try says what it was.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rhymeflow.errors import StorageError
from rhymeflow.store import final, schema
from rhymeflow.store import statements as sql
from rhymeflow.store.final import OnDisk
from rhymeflow.utils.disk import fault_of


class Transaction:
    """The one that is open, and after each commit the next one."""

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        """Create the store or, unless it is to be new, open it to go on.

        Raises:
            UserError: see `schema.open_for_writing`.
        """
        self._path = path
        self.connection, self._lock = schema.open_for_writing(path, is_new=is_new)
        self._rows: dict[str, list[tuple[Any, ...]]] = {}
        self._file = OnDisk(path)
        self._fault: StorageError | None = None
        self._is_open = True

    def put(self, statement: str, *values: Any) -> None:
        """Keep a row for `statement`, one of `statements.ORDER`."""
        self._rows.setdefault(statement, []).append(values)

    def write(self) -> None:
        """Bring all that was put into the transaction, so that this connection sees it."""
        with self._faults():
            self._execute()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """For statements on `connection` that change more than what was put."""
        with self._faults():
            self._begin()
            yield

    def commit(self, *, durable_seq: int | None = None) -> None:
        """End the transaction. `durable_seq`, the last event: also against the loss of power.

        Raises:
            StorageError: the disk is full, or the file was deleted or damaged.
        """
        with self._faults():
            self._file.check()
            self._execute()
            if self.connection.in_transaction:
                self.connection.execute("COMMIT")
            if durable_seq is not None:
                self._flush(durable_seq)

    def close(self) -> None:
        """Release the file, which then is whole without its `-wal`.

        What was not committed is dropped, as in a crash. After a fault of the disk file and `-wal`
        may be needed together; a file that was deleted is written again.
        """
        if not self._is_open:
            return
        self._is_open = False
        try:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            if self._file.is_missing:
                final.replace(self.connection, self._path)
            elif self._fault is None:
                final.make_whole(self.connection, self._path)
            else:
                with suppress(sqlite3.Error, OSError):  # that there is a fault was said
                    final.make_whole(self.connection, self._path)
        finally:
            self.connection.close()
            os.close(self._lock)

    def close_if_missing(self) -> None:
        """Close the store if its file was deleted, and so write it again; readers find it then."""
        if self._is_open and self._file.is_missing:
            self.close()

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Raise what the disk did as a `StorageError`, and again at any later try to write."""
        if self._fault is not None:
            raise self._fault
        try:
            yield
        except (sqlite3.Error, StorageError) as error:
            self._fault = fault_of(error, self._path.parent, self._path)
            if self._fault is None:
                raise
            self._rows.clear()
            with suppress(sqlite3.Error):  # it may have ended the transaction by itself
                self.connection.execute("ROLLBACK")
            raise self._fault from error

    def _flush(self, seq: int) -> None:
        # In WAL mode a commit at FULL flushes the whole journal, and with it the commits before,
        # which were written at NORMAL. The mark is there so that there is something to commit.
        self.connection.execute("PRAGMA synchronous = FULL")
        self.connection.execute("INSERT OR REPLACE INTO meta VALUES ('durable_seq', ?)", (seq,))
        self.connection.execute("PRAGMA synchronous = NORMAL")

    def _begin(self) -> None:
        if not self.connection.in_transaction:
            self.connection.execute("BEGIN IMMEDIATE")

    def _execute(self) -> None:
        if self._rows:
            self._begin()
        for statement in sql.ORDER:
            rows = self._rows.pop(statement, None)
            if rows is None:
                continue
            try:
                changed = self.connection.executemany(statement, rows).rowcount
            except sqlite3.Error as error:
                error.add_note(f"while writing to {self._path}")
                raise
            assert statement not in sql.CHANGES_ONE or changed == len(rows), (
                f"{statement}: {len(rows)} rows were to change, and {changed} did"
            )
