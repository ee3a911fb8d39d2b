"""Counts consecutive failures, and stops the run at a limit."""

from __future__ import annotations

from rhymeflow.errors import UserError


class ConsecutiveFailures:
    """Counts calls, or other `things`, that failed since one last succeeded. `field` is the field
    of the configuration with the limit."""

    def __init__(self, limit: int, field: str, things: str = "calls", count: int = 0) -> None:
        self._limit, self._field, self._things, self._count = limit, field, things, count

    def count(self, error: str | None) -> None:
        """Count the end of a call; `error` is the reason if it failed. Raises `UserError` if
        `limit` calls in a row have failed."""
        if error is None:
            self._count = 0
            return
        self._count += 1
        if self._count == self._limit:
            raise UserError(
                f"{error}; {self._count} {self._things} in a row failed ({self._field})"
            )
