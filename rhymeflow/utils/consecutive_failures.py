"""Counts what failed one after the other, and stops where it is too much."""

from __future__ import annotations

from rhymeflow.errors import UserError


class ConsecutiveFailures:
    """How many calls have failed since one did not, or other `things`; `field` of the configuration
    has the limit."""

    def __init__(self, limit: int, field: str, things: str = "calls", count: int = 0) -> None:
        self._limit, self._field, self._things, self._count = limit, field, things, count

    def count(self, error: str | None) -> None:
        """One has ended; `error` says why it failed, if it did.

        Raises:
            UserError: as many in a row as the limit have failed.
        """
        if error is None:
            self._count = 0
            return
        self._count += 1
        if self._count == self._limit:
            raise UserError(
                f"{error}; {self._count} {self._things} in a row failed ({self._field})"
            )
