"""The directories of a run's checkpoints: `RUN_DIR/checkpoints/step-N` for each saved version N."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

CHECKPOINTS = "checkpoints"
UNFINISHED = ".unfinished"
"""Suffix of a directory that is still being written."""
AHEAD, DAMAGED = "ahead-of-the-log-", "damaged-"
"""Prefixes of checkpoints that are newer than the log, and of those that cannot be read."""


def checkpoints_up_to(directory: Path, newest: int) -> dict[int, Path]:
    """Return the complete checkpoints of versions up to `newest`, in ascending order."""
    paths = {
        int(path.name.removeprefix("step-")): path
        for path in directory.glob("step-*")
        if not path.name.endswith(UNFINISHED)
    }
    return {version: paths[version] for version in sorted(paths) if version <= newest}


def set_aside(directory: Path, newest: int) -> None:
    """Rename complete checkpoints of versions above `newest`, the last in the log: the resumed run
    may reach other weights under the same version numbers."""
    for version, path in checkpoints_up_to(directory, sys.maxsize).items():
        if version > newest:
            rename(path, AHEAD)


def rename(path: Path, kind: str) -> None:
    """Prefix a checkpoint's name with `kind`, so that it no longer counts as a checkpoint."""
    aside = path.with_name(kind + path.name)
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
