"""What can go wrong on a disk: directories that are made and taken away, and its faults."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rhymeflow.errors import StorageError, UserError, to_resume

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_FAULTS = (*_NO_ROOM, errno.EIO, errno.EROFS, errno.EFBIG, errno.ENOENT, errno.ESTALE)

_SQLITE_FULL, _SQLITE_FAULTS = 13, {8, 10, 11, 13, 14, 26}
"""Read-only, I/O error, corrupt, full, cannot be opened, no database: https://sqlite.org/rescode.html"""


def check_writable(path: Path, field: str) -> None:
    """Try to write where `path` is, or would be; leaves nothing. `field` gave it.

    Raises:
        UserError: it cannot be written.
    """
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    try:  # permissions say little: root has them on file systems that nobody can write to
        with tempfile.TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        reason = f"{there}: {error.strerror}"
        raise UserError(f"{field}: {path} cannot be written: {reason}") from None


def make(path: Path, *, exist_ok: bool) -> list[Path]:
    """Make a directory; return it and its parents as far as they were not there, itself first.

    Raises:
        OSError: it cannot be made, or `FileExistsError`: it was made by somebody else.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=exist_ok)
    return missing


def remove_if_empty(made: Iterable[Path]) -> None:
    """Remove these directories in their order, as far as nothing is in them."""
    for each in made:
        with suppress(OSError):
            each.rmdir()


def flush(path: Path) -> None:
    """Bring a file, or a directory's entries, to the disk, so that it survives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes) -> None:
    """Write a file, which is whole or as it was, also on a full disk."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def fault_of(error: BaseException, run_dir: Path, path: Path | None = None) -> StorageError | None:
    """What to say of `error` if it is a fault of the disk that has `run_dir`, else `None`.

    `path`: what was written, where the error does not say.
    """
    import sqlite3  # the controller loads no database

    if isinstance(error, StorageError):
        return error
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)
        if code is None or code & 0xFF not in _SQLITE_FAULTS:
            return None
        is_full = code & 0xFF == _SQLITE_FULL
    elif isinstance(error, OSError) and error.errno in _FAULTS:
        path = Path(os.fsdecode(error.filename)) if error.filename is not None else path
        if error.errno == errno.ENOENT and run_dir not in (path, *getattr(path, "parents", ())):
            return None
        is_full = error.errno in _NO_ROOM
    else:
        return None
    if is_full:
        return no_room(path or run_dir, run_dir)
    if not run_dir.is_dir():
        return StorageError(f"{run_dir}: was deleted while the run was writing to it")
    what = error.strerror if isinstance(error, OSError) else error
    return StorageError(
        f"{path or run_dir}: {what}; when the disk is in order: {to_resume(run_dir)}"
    )


def no_room(path: Path, run_dir: Path) -> StorageError:
    """The disk was full when `path` was written."""
    return StorageError(f"{path}: the disk is full; free space there, then: {to_resume(run_dir)}")


@contextmanager
def one_line(run_dir: Path) -> Iterator[None]:
    """Raise the first fault of the disk in the block, whatever else failed because of it."""
    try:
        yield
    except BaseException as error:
        chain: list[BaseException] = []
        cause: BaseException | None = error
        while cause is not None and cause not in chain:
            chain.append(cause)
            cause = cause.__cause__ or cause.__context__
        known = [
            each for each in chain if isinstance(each, StorageError)
        ]  # these say what and where
        faults = known or [fault for each in chain if (fault := fault_of(each, run_dir))]
        if faults:
            raise faults[-1] from None
        raise
