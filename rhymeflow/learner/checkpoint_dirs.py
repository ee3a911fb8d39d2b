"""Where a run's checkpoints are: `RUN_DIR/checkpoints/step-N` for each version N that was saved.

Holds true: a directory without the ending `UNFINISHED` is a complete checkpoint. Loads no torch.
"""

from __future__ import annotations

from pathlib import Path

CHECKPOINTS = "checkpoints"
"""The folder of a run directory that holds `step-N` for each version N that was saved."""

UNFINISHED = ".unfinished"
"""Ends the name of a directory that is being written, or was when its writer ended."""


def checkpoints_up_to(directory: Path, newest: int) -> dict[int, Path]:
    """The complete checkpoints of versions up to `newest`, in ascending order."""
    found = {
        int(path.name.removeprefix("step-")): path
        for path in directory.glob("step-*")
        if not path.name.endswith(UNFINISHED)
    }
    return {version: found[version] for version in sorted(found) if version <= newest}
