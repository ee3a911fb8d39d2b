"""The staleness bound of a schedule by its name, for the configuration and readers of logs."""

from __future__ import annotations

FIXED_BOUNDS = {"synchronous": 0, "one_step": 1, "histopipe": 1}
"""Bounds of schedules for which `schedule.max_staleness` cannot be chosen."""


def bound_of(name: str, max_staleness: int | None) -> int:
    """Return the staleness bound of the schedule `name`, in versions."""
    return FIXED_BOUNDS.get(name, 1) if max_staleness is None else max_staleness
