"""Where a run's checkpoints are: `RUN_DIR/checkpoints/step-N` for each version N that was saved."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

CHECKPOINTS = "checkpoints"
UNFINISHED = ".unfinished"
"""Ends the name of a directory that is not complete."""
AHEAD, DAMAGED = "ahead-of-the-log-", "damaged-"
"""Begin the names of checkpoints that were set aside, and of those that could not be read."""


def checkpoints_up_to(directory: Path, newest: int) -> dict[int, Path]:
    """The complete checkpoints of versions up to `newest`, in ascending order."""
    found = {
        int(path.name.removeprefix("step-")): path
        for path in directory.glob("step-*")
        if not path.name.endswith(UNFINISHED)
    }
    return {version: found[version] for version in sorted(found) if version <= newest}


def set_aside(directory: Path, newest: int) -> None:
    """Rename the complete checkpoints of later versions than `newest`, where the log ends: the
    resumed run may come to other weights under the same numbers."""
    for version, path in checkpoints_up_to(directory, sys.maxsize).items():
        if version > newest:
            rename(path, AHEAD)


def rename(path: Path, kind: str) -> None:
    """Give a checkpoint a name that begins with `kind`, so that it is not taken for one."""
    aside = path.with_name(kind + path.name)
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
