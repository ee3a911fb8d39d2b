"""How much of a run is in its mirror, as `mirror.json` in the run directory says.

Holds true: what it says is in the mirror is there; the mirror may have a little more. Knows nothing
of the mirror itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

FILE = "mirror.json"


class Mirrored(msgspec.Struct):
    """What is in a mirror."""

    url: str
    run: str
    """Which run it is of."""
    lineage: str
    number: int
    """The last object of the log."""
    position: dict[str, int]
    """The last rows that are copied."""
    mark: tuple[int, float] | None
    """Number and time of the last event that is copied, by which the log is known again."""
    whole: tuple[int, float] | None = None
    """Number and time of the last event of the state that a run can be resumed from."""
    trees: dict[str, Any] = {}
    """Directories that are complete there."""
    snapshots: dict[int, str] = {}
    """States of the coordinator that are there."""
    problem: str | None = None
    """Why it is not up to date."""


def read(run_dir: Path) -> Mirrored | None:
    """What is in the run's mirror; None if it has none, or that is not known."""
    try:
        return msgspec.json.decode((run_dir / FILE).read_bytes(), type=Mirrored)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def write(run_dir: Path, mirrored: Mirrored) -> None:
    """Say what is in it."""
    unfinished = run_dir / f"{FILE}.unfinished"
    unfinished.write_bytes(msgspec.json.encode(mirrored))
    unfinished.replace(run_dir / FILE)
