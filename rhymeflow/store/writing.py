"""Whether a controller carries a run on right now.

Holds true: looking does not keep a controller from starting where none is: the lock is tried only
where the process that it names lives, or is on another machine. Writes nothing.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from pathlib import Path

from rhymeflow.store.schema import LOCK


def is_written(run_dir: Path) -> bool:
    """Whether a process holds the lock of the run in `run_dir`."""
    try:
        descriptor = os.open(run_dir / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return False
    try:
        if not _may_live(os.read(descriptor, 1024).decode(errors="replace")):
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
    finally:
        os.close(descriptor)


def _may_live(text: str) -> bool:
    """Whether the process that locked last, as it wrote of itself, may still be there."""
    named = re.fullmatch(r"process (\d+) on (.*)", text)
    if named is None or named[2] != socket.gethostname():
        return True
    try:
        os.kill(int(named[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


__all__ = ["is_written"]
