"""Reading an event store whose file may be damaged: a disk that failed, a copy cut short.

An error because of the file becomes a `UserError`; an error with an undamaged file is a defect and
keeps its traceback. Damage is what SQLite finds, and text that does not decode.
"""

from __future__ import annotations

import contextlib
import sqlite3
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from rhymeflow.errors import UserError
from rhymeflow.store import schema
from rhymeflow.store.checkpoint_dirs import CHECKPOINTS, checkpoints_up_to
from rhymeflow.store.reader import IncompleteBatch, TrajectoryReader
from rhymeflow.store.schema import EVENTS

_ERRORS = (
    *(sqlite3.DatabaseError, msgspec.DecodeError, struct.error, IncompleteBatch),
    *(ValueError, TypeError, LookupError, AttributeError, AssertionError),
)
"""What damage may lead to; the file is checked when one of them is raised."""


@contextlib.contextmanager
def open_undamaged(path: Path) -> Iterator[TrajectoryReader]:
    """Open the store, and close it afterwards. Raises `UserError` if there is none, it is of
    another schema, or what was asked of it cannot be read because the file is damaged."""
    reader = TrajectoryReader(path)
    try:
        with explained(path):
            yield reader
    finally:
        reader.close()


def damage_of(path: Path, error: Exception) -> str | None:
    """What is wrong with the file, in a line; None if nothing is. Reads all of it."""
    # Batches were whole when they were trained on, and the log's text was encoded.
    if isinstance(error, IncompleteBatch | msgspec.DecodeError):
        return str(error)
    found = _quick_check(path)
    # An index may be wrong where each page by itself is right.
    if found == "ok" and getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_CORRUPT:
        found = str(error)
    return None if found == "ok" else " ".join(found.replace("*", "").split())


@contextlib.contextmanager
def explained(
    path: Path, look: Callable[[Path, Exception], str | None] = damage_of
) -> Iterator[None]:
    """Raise a `UserError` for an error in the block if the store at `path` is damaged. `look` is
    `damage_of`, or calls it on the machine that has the file."""
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


def check_log(run_dir: Path) -> None:
    """Raise `UserError` if the run's log is damaged, with what is left of the run."""
    path = run_dir / EVENTS
    if not path.is_file():
        return  # another check refuses that
    if (found := _quick_check(path)) != "ok":
        found = " ".join(found.split())
        raise UserError(f"{path}: is damaged ({found}), cannot be resumed; {_left(run_dir)}")


def _quick_check(path: Path) -> str:
    """What SQLite finds wrong in a file; "ok" if nothing."""
    try:
        with contextlib.closing(schema.connect(path)) as connection:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        found = error
    return str(found)


def _left(run_dir: Path) -> str:
    checkpoints = checkpoints_up_to(run_dir / CHECKPOINTS, sys.maxsize)
    if not checkpoints:
        return "there is no checkpoint either"
    *_, newest = checkpoints.values()
    return f"a new run can begin with its last checkpoint: --model.name {newest}"
