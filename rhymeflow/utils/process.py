"""What a worker's process sets for itself: its name, its memory, and where its prints go."""

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
    """Have `top`, `ps -o comm` and `pkill` call this process `rf:NAME`, of which Linux keeps 15
    bytes. Called in its main thread; threads begun later inherit it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"{PREFIX}{name}".encode(), 0, 0, 0)


def keep_freed_memory() -> None:
    """Have this process keep up to 2 GiB of what it frees, for what it allocates next.

    By default glibc gives each large array back to the system, and the next must be cleared and
    mapped again, page by page: of a learner's step a twentieth. Elsewhere nothing is changed.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, 2**30)
        libc.mallopt(_TRIM_THRESHOLD, _LARGEST)


def redirect_output(path: Path) -> None:
    """Append whatever this process, C code and child processes included, prints from now on to the
    file, since the terminal belongs to the controller's display.
    """
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
    """The file that `redirect_output` was given, for processes that this one starts."""
    assert _output is not None, "output goes to the terminal"
    return _output
