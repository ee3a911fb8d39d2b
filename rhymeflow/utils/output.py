"""Where a worker's prints go: a file, since the terminal belongs to the controller's display.

Holds true: what C code and child processes print goes there too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_path: Path | None = None


def path() -> Path:
    """The file that `redirect` was given, for processes that this one starts."""
    assert _path is not None, "output goes to the terminal"
    return _path


def redirect(path: Path) -> None:
    """Append whatever this process, C code included, prints from now on to the file."""
    global _path
    _path = path
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    for text in (sys.stdout, sys.stderr):
        text.reconfigure(line_buffering=True)  # type: ignore[union-attr]
