"""Bringing what was written to the disk, so that it survives a loss of power."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Bring a file, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
