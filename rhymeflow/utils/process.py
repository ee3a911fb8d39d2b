"""Settings of a worker's process: its name, its allocator, and the file for its output."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

PREFIX = "rf:"
_PR_SET_NAME = 15  # prctl(2)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGEST = 2**31 - 1
_output: Path | None = None


def set_process_name(name: str) -> None:
    """Name this process `rf:NAME` in `top`, `ps -o comm` and `pkill`; Linux keeps 15 bytes. Call it
    in the main thread; threads that begin later inherit it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"{PREFIX}{name}".encode(), 0, 0, 0)


def keep_freed_memory() -> None:
    """Make glibc keep up to 2 GiB of freed memory for later allocations. By default it returns each
    large array to the system, and the next one is mapped and cleared again, page by page: a
    twentieth of a learner's step. Other C libraries are not changed."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, 2**30)
        libc.mallopt(_TRIM_THRESHOLD, _LARGEST)


def redirect_output(path: Path) -> None:
    """Append the output of this process, its C code and its child processes to the file, because
    the controller's display uses the terminal."""
    global _output
    _output = path
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    for text in (sys.stdout, sys.stderr):
        text.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def output_path() -> Path:
    """Return the file of `redirect_output`, for processes that this one starts."""
    assert _output is not None, "output goes to the terminal"
    return _output
