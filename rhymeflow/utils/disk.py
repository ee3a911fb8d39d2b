"""Creates directories, writes files safely, and recognises faults of the disk."""

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
"""SQLite's result codes for a full disk and all faults (https://sqlite.org/rescode.html)."""


def check_writable(path: Path, field: str) -> None:
    """Check by a temporary directory that `path`, the value of `field`, can be written or created.
    Raises `UserError` if it cannot."""
    existing = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not existing.is_dir():
        raise UserError(f"{field}: {path} cannot be written: {existing} is no directory")
    try:  # permissions are not enough: root has them even on read-only file systems
        with tempfile.TemporaryDirectory(dir=existing):
            pass
    except OSError as error:
        reason = f"{existing}: {error.strerror}"
        raise UserError(f"{field}: {path} cannot be written: {reason}") from None


def make_directory(path: Path, *, exist_ok: bool) -> list[Path]:
    """Create a directory; return all directories that did not exist, itself first, then parents.
    Raises `OSError` if it cannot be created, or it exists and not `exist_ok`
    (`FileExistsError`)."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=exist_ok)
    return missing


def remove_if_empty(directories: Iterable[Path]) -> None:
    """Remove those of these directories that are empty, in this order."""
    for each in directories:
        with suppress(OSError):
            each.rmdir()


def flush(path: Path) -> None:
    """Write a file, or a directory's entries, to the disk, so that it survives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes) -> None:
    """Replace a file's content; after an error, such as a full disk, the old content is there."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def fault_of(error: BaseException, run_dir: Path, path: Path | None = None) -> StorageError | None:
    """Return a `StorageError` for `error` if it is a fault of the disk with `run_dir`, else None.
    `path` is the file that was written, for errors that do not name it."""
    import sqlite3  # not above: not every process needs it

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
    reason = error.strerror if isinstance(error, OSError) else error
    return StorageError(
        f"{path or run_dir}: {reason}; when the disk is in order: {to_resume(run_dir)}"
    )


def no_room(path: Path, run_dir: Path) -> StorageError:
    """Return the error for a full disk on writing `path`."""
    return StorageError(f"{path}: the disk is full; free space there, then: {to_resume(run_dir)}")


@contextmanager
def one_line(run_dir: Path) -> Iterator[None]:
    """If the block raises because of a disk fault, raise that as a `StorageError` of one line."""
    try:
        yield
    except BaseException as error:
        chain: list[BaseException] = []
        cause: BaseException | None = error
        while cause is not None and cause not in chain:
            chain.append(cause)
            cause = cause.__cause__ or cause.__context__
        known = [each for each in chain if isinstance(each, StorageError)]  # these name the file
        faults = known or [fault for each in chain if (fault := fault_of(each, run_dir))]
        if faults:
            raise faults[-1] from None
        raise


def size_text(num_bytes: float) -> str:
    """Return the size in MB or GB."""
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.2f} GB"
