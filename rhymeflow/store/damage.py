"""Reading an event store whose file may be damaged: a disk that failed, a copy cut short.

Holds true: what cannot be read because of the file is one `UserError`; an error that an undamaged
file gives is a defect and keeps its traceback. Changes nothing in the file.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from rhymeflow.errors import UserError
from rhymeflow.store.reader import TrajectoryReader


@contextlib.contextmanager
def open_undamaged(path: Path) -> Iterator[TrajectoryReader]:
    """Open the store, and close it afterwards.

    Raises:
        UserError: there is none, it is of another schema, or what was asked of it cannot be read
            because the file is damaged.
    """
    reader = TrajectoryReader(path)
    try:
        yield reader
    except (sqlite3.DatabaseError, json.JSONDecodeError, UnicodeDecodeError) as error:
        damage = _damage(reader, error)
        if damage is None:
            raise
        raise UserError(
            f"{path}: is damaged: {damage} (the command `.recover` of sqlite3 saves what can be "
            "read)"
        ) from None
    finally:
        reader.close()


def _damage(reader: TrajectoryReader, error: Exception) -> str | None:
    """What is wrong with the file, in a line; None if nothing is. Reads all of it."""
    try:
        ((found,),) = reader.query("PRAGMA quick_check(1)")
    except (sqlite3.DatabaseError, UnicodeDecodeError) as again:
        found = str(again)
    # What is asked of an index may be wrong where each page by itself is right.
    if found == "ok" and getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_CORRUPT:
        found = str(error)
    return None if found == "ok" else " ".join(found.replace("*", "").split())
