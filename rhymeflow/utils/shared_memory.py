"""Creates, maps and frees named memory that processes of one machine share.

New memory is zero. The process that created it frees it, or else its resource tracker does. It is
mapped directly and not through `multiprocessing.shared_memory`, with which before Python 3.13 the
tracker of a process that only attached would free it too."""

from __future__ import annotations

import _posixshmem
import hashlib
import mmap
import os
import secrets
from multiprocessing import resource_tracker
from pathlib import Path

from rhymeflow.errors import UserError

DIRECTORY = Path("/dev/shm")  # Where Linux shows POSIX shared memory as files. macOS has none.

_TRACKED_AS = "shared_memory"  # the resource tracker's word for it
LINE = 64  # bytes of a cache line


def new_name(prefix: str) -> str:
    """Return a free name: `PREFIX-PID-` and random digits. macOS allows 30 characters."""
    return f"{prefix}-{os.getpid()}-{secrets.token_hex(3)}"


def prefix_for(run_dir: Path, kind: str) -> str:
    """Return the prefix of names of a run's memory, by which memory of a killed run is found;
    `kind` is a letter. The directory's inode identifies the run, so a copy has another prefix."""
    status = run_dir.stat()
    identity = hashlib.blake2b(f"{status.st_dev}:{status.st_ino}".encode(), digest_size=4)
    return f"rf-{identity.hexdigest()}-{kind}"


def free_left(prefix: str) -> None:
    """Remove all names with this prefix, which no process may be using; on macOS it finds none."""
    for path in DIRECTORY.glob(f"{prefix}*"):
        path.unlink(missing_ok=True)


def create(name: str, size: int, *, what: str, advice: str) -> mmap.mmap:
    """Create `size` bytes of shared memory under a new name. On Linux all of it is reserved,
    because a write beyond the machine's memory would kill the writer with SIGBUS. Raises
    `UserError` with `what` and `advice` if the machine's shared memory is too small."""
    descriptor = open_descriptor(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        resource_tracker.register(f"/{name}", _TRACKED_AS)
        os.ftruncate(descriptor, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size, mmap.MAP_SHARED)
    except OSError as error:
        free(name)
        raise UserError(
            f"{DIRECTORY} has no room for {what} ({size / 2**20:.0f} MiB): {error.strerror}; "
            f"{advice}"
        ) from error
    finally:
        os.close(descriptor)


def attach(name: str, *, writable: bool) -> mmap.mmap:
    """Map memory that another process created. Raises `FileNotFoundError` if the creator is
    gone."""
    descriptor = open_descriptor(name, os.O_RDWR if writable else os.O_RDONLY)
    try:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(descriptor, 0, mmap.MAP_SHARED, protection)
    finally:
        os.close(descriptor)


def free(name: str) -> None:
    """Remove the name; the memory is freed when no process maps it any more."""
    _posixshmem.shm_unlink(f"/{name}")
    resource_tracker.unregister(f"/{name}", _TRACKED_AS)


def open_descriptor(name: str, flags: int) -> int:
    """Open the memory as a file, which the caller must close with `os.close`."""
    return _posixshmem.shm_open(f"/{name}", flags, mode=0o600)


def whole_lines(num_bytes: int) -> int:
    """Round up a number of bytes to whole cache lines."""
    return -(-num_bytes // LINE) * LINE
