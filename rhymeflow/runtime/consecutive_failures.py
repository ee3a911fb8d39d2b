"""Counts calls of user code that failed one after the other, and stops where they are too many.

Knows nothing of what is called.
"""

from __future__ import annotations

from rhymeflow.errors import UserError


class ConsecutiveFailures:
    """How many calls have failed since one did not; `field` of the configuration has the limit."""

    def __init__(self, limit: int, field: str) -> None:
        self._limit, self._field, self._count = limit, field, 0

    def count(self, error: str | None) -> None:
        """A call has ended; `error` says why it failed, if it did.

        Raises:
            UserError: as many in a row as the limit have failed.
        """
        if error is None:
            self._count = 0
            return
        self._count += 1
        if self._count == self._limit:
            raise UserError(f"{error}; {self._count} calls in a row failed ({self._field})")
