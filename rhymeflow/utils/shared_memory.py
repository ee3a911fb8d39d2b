"""Named memory that processes of one machine share: created, mapped and freed.

Holds true:
- all of it is reserved when it is created: were it not, the first write past what the machine has
  would kill the writer with SIGBUS;
- it is zeros at first;
- it belongs to the process that created it: it is freed when that process says so, or by the
  interpreter's resource tracker when that process dies. A process that attached to it frees
  nothing.

The memory is mapped directly rather than through `multiprocessing.shared_memory`: before Python
3.13 that class hands memory which a process merely attached to over to that process's resource
tracker, which frees it when the process ends.

Knows nothing of what lies in it.
"""

from __future__ import annotations

import mmap
import os
import secrets
from multiprocessing import resource_tracker
from pathlib import Path

from rhymeflow.errors import UserError

_DIRECTORY = Path("/dev/shm")  # where Linux shows POSIX shared memory as files
_TRACKED_AS = "shared_memory"  # the resource tracker's word for it
LINE = 64
"""Bytes of a cache line."""


def new_name(prefix: str) -> str:
    """Return a name that is free: `PREFIX-PID-` and chance."""
    return f"{prefix}-{os.getpid()}-{secrets.token_hex(4)}"


def create(name: str, size: int, *, what: str, advice: str) -> mmap.mmap:
    """Make `size` bytes of shared memory under a new name.

    Raises:
        UserError: the machine's shared memory is too small for `what`; ends with the advice.
    """
    descriptor = os.open(path_of(name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        resource_tracker.register(f"/{name}", _TRACKED_AS)
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size, mmap.MAP_SHARED)
    except OSError as error:
        free(name)
        raise UserError(
            f"{_DIRECTORY} has no room for {what} ({size / 2**20:.0f} MiB): {error.strerror}; "
            f"{advice}"
        ) from error
    finally:
        os.close(descriptor)


def attach(name: str, *, writable: bool) -> mmap.mmap:
    """Map memory that another process created.

    Raises:
        FileNotFoundError: the creator is gone.
    """
    descriptor = os.open(path_of(name), os.O_RDWR if writable else os.O_RDONLY)
    try:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(descriptor, 0, mmap.MAP_SHARED, protection)
    finally:
        os.close(descriptor)


def free(name: str) -> None:
    """Remove the name; the memory goes when the last process that mapped it does."""
    path_of(name).unlink()
    resource_tracker.unregister(f"/{name}", _TRACKED_AS)


def path_of(name: str) -> Path:
    """The file that stands for the memory."""
    return _DIRECTORY / name


def whole_lines(num_bytes: int) -> int:
    """Return the bytes of the cache lines that so many bytes take."""
    return -(-num_bytes // LINE) * LINE


__all__ = ["LINE", "attach", "create", "free", "new_name", "path_of", "whole_lines"]
