"""The file of a store: whether it is still there, and that it alone is the whole store at the end.

SQLite keeps what was written last in `events.db-wal` until a checkpoint brings it into the file.
A transaction that reads an older state hinders one. Such a reader is waited for, and if it stays, a
copy of the whole store takes the file's place: a `-wal` beside it has nothing that it has not.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from rhymeflow.errors import StorageError, to_resume
from rhymeflow.utils.disk import flush

WAIT_SECONDS = 5.0
"""For readers in the middle of something. The run's own are done within milliseconds."""


def make_whole(connection: sqlite3.Connection, path: Path) -> None:
    """Bring everything into the file at `path`; `connection`, its only writer, may be closed then.

    Raises:
        sqlite3.Error, OSError: there is no room for a copy, where one is needed. Nothing is lost:
            file and `-wal` together are the store.
    """
    connection.execute(f"PRAGMA busy_timeout = {WAIT_SECONDS * 1000:.0f}")
    is_busy, in_wal, copied = connection.execute("PRAGMA wal_checkpoint(FULL)").fetchone()
    if not is_busy or in_wal == copied >= 0:  # below 0: it could not even begin
        connection.execute("PRAGMA busy_timeout = 0")  # it need not be empty, only superfluous
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return
    try:
        replace(connection, path)
    except (sqlite3.Error, OSError) as error:
        error.add_note(f"{path} has to be copied together with {path.name}-wal")
        raise


def replace(connection: sqlite3.Connection, path: Path) -> None:
    """Put a copy of what `connection` has open at `path`, and close it."""
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
    """The file at `path`, as it was when this was made."""

    def __init__(self, path: Path) -> None:
        self._path, self._run_dir = path, path.parent
        there = path.stat()
        self._identity, self._size = (there.st_dev, there.st_ino), there.st_size

    @property
    def is_missing(self) -> bool:
        """Whether the file was deleted and its directory was not."""
        return self._run_dir.is_dir() and not os.path.lexists(self._path)

    def check(self) -> None:
        """Raise `StorageError` if it was deleted, replaced or cut short. Costs microseconds."""
        try:
            there = self._path.stat()
        except FileNotFoundError:
            if self._run_dir.is_dir():
                raise StorageError(
                    f"{self._path}: was deleted while the run was writing to it; it is written "
                    f"again from what is open. To go on: {to_resume(self._run_dir)}"
                ) from None
            raise StorageError(
                f"{self._run_dir}: was deleted while the run was writing to it"
            ) from None
        if (there.st_dev, there.st_ino) != self._identity:
            raise StorageError(f"{self._path}: was replaced while the run was writing to it")
        if there.st_size < self._size:
            raise StorageError(
                f"{self._path}: was cut from {self._size:,} to {there.st_size:,} bytes while the "
                "run was writing to it; what is missing is lost. With a copy of it in its place, "
                f"{to_resume(self._run_dir)} goes on; checkpoints are in "
                f"{self._run_dir / 'checkpoints'}"
            )
        self._size = there.st_size
