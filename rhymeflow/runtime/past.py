"""What a run was when its log ended: what `replay.py` finds and `resume.py` takes up.

Knows nothing of where the log is kept.
"""

from __future__ import annotations

from typing import NamedTuple

from rhymeflow.core.commands import Command, Train
from rhymeflow.core.coordinator import Coordinator


class Past(NamedTuple):
    """What a run was when its log ended."""

    coordinator: Coordinator
    attempts: int = 0
    """How often it was started."""
    seconds: float = 0.0
    """How long it ran, those between attempts not counted."""
    num_drawn: int = 0
    """Groups whose prompt was taken from the data, not from a group that had ended."""
    unrecorded: tuple[tuple[int, Command], ...] = ()
    """Commands that the log does not have, with the numbers of their events. All were given after
    all that it has."""
    training: Train | None = None
    """The batch that is being trained on."""
    last_event: int = 0
    """The number of the last event in the log."""
    notes: tuple[str, ...] = ()
    """What the user should know of how it was found."""
