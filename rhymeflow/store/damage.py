"""Reading an event store whose file may be damaged: a disk that failed, a copy cut short.

Holds true: what cannot be read because of the file is one `UserError`; an error that an undamaged
file gives is a defect and keeps its traceback. Changes nothing in the file.
"""

from __future__ import annotations

import contextlib
import sqlite3
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from rhymeflow.errors import UserError
from rhymeflow.store import values
from rhymeflow.store.reader import IncompleteBatch, TrajectoryReader

_ERRORS = (
    *(sqlite3.DatabaseError, msgspec.DecodeError, struct.error, IncompleteBatch),
    *(ValueError, TypeError, LookupError, AttributeError, AssertionError),
)
"""What damage may lead to. Whether it did is looked at then."""


@contextlib.contextmanager
def open_undamaged(path: Path) -> Iterator[TrajectoryReader]:
    """Open the store, and close it afterwards.

    Raises:
        UserError: there is none, it is of another schema, or what was asked of it cannot be read
            because the file is damaged.
    """
    reader = TrajectoryReader(path)
    try:
        with explained(path):
            yield reader
    finally:
        reader.close()


def damage_of(path: Path, error: Exception) -> str | None:
    """What is wrong with the file, in a line; None if nothing is. Reads all of it."""
    if isinstance(error, IncompleteBatch):  # one that was trained on: it was whole then
        return str(error)
    reader = TrajectoryReader(path)
    try:
        ((found,),) = reader.query("PRAGMA quick_check(1)")
        if found == "ok":
            found = values.first_wrong(path) or found
    except (sqlite3.DatabaseError, UnicodeDecodeError) as again:
        found = str(again)
    finally:
        reader.close()
    # What is asked of an index may be wrong where each page by itself is right.
    if found == "ok" and getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_CORRUPT:
        found = str(error)
    return None if found == "ok" else " ".join(found.replace("*", "").split())


@contextlib.contextmanager
def explained(
    path: Path, look: Callable[[Path, Exception], str | None] = damage_of
) -> Iterator[None]:
    """Raise a `UserError` for an error in the block if the store at `path` is damaged.

    `look` is `damage_of`, or has it called where the file is.
    """
    try:
        yield
    except UserError:
        raise
    except _ERRORS as error:
        damage = look(path, error)
        if damage is None:
            raise
        raise UserError(
            f"{path}: is damaged: {damage} (the command `.recover` of sqlite3 saves what can be "
            "read)"
        ) from None
