"""The staleness bound of a schedule by its name, for the configuration and whoever reads logs."""

from __future__ import annotations

FIXED_BOUNDS = {"synchronous": 0, "one_step": 1, "histopipe": 1}
"""The schedules whose staleness bound is theirs, and not `schedule.max_staleness`."""


def bound_of(name: str, max_staleness: int | None) -> int:
    """The staleness bound of the schedule of this name, in versions."""
    return FIXED_BOUNDS.get(name, 1) if max_staleness is None else max_staleness
