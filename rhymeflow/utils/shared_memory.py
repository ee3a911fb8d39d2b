"""Named memory that processes of one machine share: created, mapped and freed.

It is zeros at first, and belongs to the process that created it: freed when that process says so,
or by its resource tracker. It is mapped directly rather than through
`multiprocessing.shared_memory`, which before Python 3.13 has the tracker of a process that merely
attached free it too.
"""

from __future__ import annotations

import _posixshmem
import hashlib
import mmap
import os
import secrets
from multiprocessing import resource_tracker
from pathlib import Path

from rhymeflow.errors import UserError

DIRECTORY = Path("/dev/shm")
"""Where Linux shows POSIX shared memory as files. macOS has none."""

_TRACKED_AS = "shared_memory"  # the resource tracker's word for it
LINE = 64
"""Bytes of a cache line."""


def new_name(prefix: str) -> str:
    """Return a name that is free: `PREFIX-PID-` and chance. macOS takes 30 letters."""
    return f"{prefix}-{os.getpid()}-{secrets.token_hex(3)}"


def prefix_for(run_dir: Path, what: str) -> str:
    """How the names of a run's memory begin, so that what a killed run left is found; `what` is a
    letter. The directory's number stands for it: a copy of the run has another one.
    """
    there = run_dir.stat()
    identity = hashlib.blake2b(f"{there.st_dev}:{there.st_ino}".encode(), digest_size=4)
    return f"rf-{identity.hexdigest()}-{what}"


def free_left(prefix: str) -> None:
    """Remove all names with this prefix, which nobody may use any more; on macOS none is found."""
    for path in DIRECTORY.glob(f"{prefix}*"):
        path.unlink(missing_ok=True)


def create(name: str, size: int, *, what: str, advice: str) -> mmap.mmap:
    """Make `size` bytes of shared memory under a new name. On Linux all of it is reserved: were it
    not, the first write past what the machine has would kill the writer with SIGBUS.

    Raises:
        UserError: the machine's shared memory is too small for `what`; ends with the advice.
    """
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
    """Map memory that another process created.

    Raises:
        FileNotFoundError: the creator is gone.
    """
    descriptor = open_descriptor(name, os.O_RDWR if writable else os.O_RDONLY)
    try:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(descriptor, 0, mmap.MAP_SHARED, protection)
    finally:
        os.close(descriptor)


def free(name: str) -> None:
    """Remove the name; the memory goes when the last process that mapped it does."""
    _posixshmem.shm_unlink(f"/{name}")
    resource_tracker.unregister(f"/{name}", _TRACKED_AS)


def open_descriptor(name: str, flags: int) -> int:
    """Open the memory as a file, which ends with the caller's `os.close`."""
    descriptor: int = _posixshmem.shm_open(f"/{name}", flags, mode=0o600)
    return descriptor


def whole_lines(num_bytes: int) -> int:
    """Return the bytes of the cache lines that so many bytes take."""
    return -(-num_bytes // LINE) * LINE
