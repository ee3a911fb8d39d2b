"""Recognises a damaged event store: a disk failed, or a copy was cut short.

An error that a damaged file caused becomes a `UserError`; an error with an undamaged file is a
defect and keeps its traceback. A file is damaged if SQLite finds errors in it, text in it does not
decode, or a batch that was trained on is incomplete."""

from __future__ import annotations

import contextlib
import sqlite3
import struct
from collections.abc import Callable, Iterator
from json import JSONDecodeError
from pathlib import Path

import msgspec

from rhymeflow.errors import UserError
from rhymeflow.store import schema
from rhymeflow.store.checkpoint_dirs import is_url, paths_of, where_of
from rhymeflow.store.reader import IncompleteBatch, TrajectoryReader
from rhymeflow.store.schema import EVENTS

_ERRORS = (
    *(sqlite3.DatabaseError, msgspec.DecodeError, struct.error, IncompleteBatch),
    *(ValueError, TypeError, LookupError, AttributeError, AssertionError),
)
"""Errors that damage may cause. When one is raised, the file is checked."""


@contextlib.contextmanager
def open_undamaged(path: Path) -> Iterator[TrajectoryReader]:
    """Open the store, and close it afterwards. Raises `UserError` if it is missing or has another
    schema version, or if the block fails because the file is damaged."""
    reader = TrajectoryReader(path)
    try:
        with explained(path):
            yield reader
    finally:
        reader.close()


def damage_of(path: Path, error: Exception) -> str | None:
    """Return what is wrong with the file in one line, or None. Reads the whole file."""
    # These prove damage: a batch was complete when it was trained on, and all text was encoded.
    is_no_text = "Could not decode to UTF-8" in str(error)
    if is_no_text or isinstance(error, IncompleteBatch | msgspec.DecodeError | JSONDecodeError):
        return " ".join(str(error)[:200].split())
    result = _quick_check(path)
    # An index may be wrong although each page by itself is right.
    if result == "ok" and getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_CORRUPT:
        result = str(error)
    return None if result == "ok" else " ".join(result.replace("*", "").split())


@contextlib.contextmanager
def explained(
    path: Path, find_damage: Callable[[Path, Exception], str | None] = damage_of
) -> Iterator[None]:
    """Turn an error in the block into a `UserError` if the store at `path` is damaged.
    `find_damage` is `damage_of`, or calls it on the machine that has the file."""
    try:
        yield
    except UserError:
        raise
    except _ERRORS as error:
        damage = find_damage(path, error)
        if damage is None:
            raise
        raise UserError(
            f"{path}: is damaged: {damage} (the command `.recover` of sqlite3 saves what can be "
            "read)"
        ) from None


def check_log(run_dir: Path) -> None:
    """Raise `UserError` if the run's log is damaged; the message names its last checkpoint."""
    path = run_dir / EVENTS
    if not path.is_file():
        return  # another check raises for that
    if (result := _quick_check(path)) != "ok":
        damage = " ".join(result.split())
        raise UserError(f"{path}: is damaged ({damage}), cannot be resumed; {_remedy(run_dir)}")


def _quick_check(path: Path) -> str:
    """Return the first error that SQLite finds in a file, or "ok"."""
    try:
        with contextlib.closing(schema.connect(path)) as connection:
            (result,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        result = error
    return str(result)


def _remedy(run_dir: Path) -> str:
    checkpoints = paths_of(run_dir)
    if is_url(where := where_of(run_dir)):
        return f"a new run can begin with a checkpoint that you copy from {where}"
    if not checkpoints:
        return "there is no checkpoint either"
    *_, newest = checkpoints.values()
    return f"a new run can begin with its last checkpoint: --model.name {newest}"
