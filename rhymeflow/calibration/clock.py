"""The time a thread had, which is not the time that passed: other programs take their share.

Holds true: what `now` leaves out is only what the thread spent waiting for a core although it could
have run, which Linux counts for each thread; elsewhere nothing is left out. Knows nothing of what
is timed.
"""

from __future__ import annotations

import os
import time

_COUNTS = "/proc/thread-self/schedstat"
"""Nanoseconds on a core, nanoseconds waiting for one, turns."""


def now() -> float:
    """Seconds, from an arbitrary point on, that this thread ran or had nothing to do."""
    return time.perf_counter() - waited()


def waited() -> float:
    """Seconds that this thread has waited for a core so far."""
    if not os.path.exists(_COUNTS):
        return 0.0
    with open(_COUNTS, "rb") as file:
        return int(file.read().split()[1]) * 1e-9


class Watch:
    """How much of the time since it was made this thread has waited for a core."""

    def __init__(self) -> None:
        self._began, self._waited = time.perf_counter(), waited()

    def share_waited(self) -> float:
        """Between 0 and 1."""
        return (waited() - self._waited) / (time.perf_counter() - self._began)


__all__ = ["Watch", "now", "waited"]
