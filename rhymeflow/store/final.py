"""The end of a store: `events.db` alone holds everything, whoever still reads it.

SQLite keeps what was written last in `events.db-wal` until a checkpoint brings it into the file.
Other connections do not hinder one, nor do transactions that read the newest state. A transaction
that reads an older state does: pages that it may still read must not be overwritten. Such a reader
is waited for, and if it stays, a copy of the whole store takes the file's place; the reader keeps
the file that it has open, with its `-wal`.

Holds true: at any moment, that of a crash included, `events.db` with whatever `-wal` lies beside it
is the whole store: a `-wal` that is left beside the copy has nothing that the copy has not. Knows
nothing of the tables.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

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
