"""Waiting for processes that answer, where there is nothing else to do."""

from __future__ import annotations

import time
from collections.abc import Iterable
from multiprocessing.connection import Connection, wait
from typing import Protocol


class Asked(Protocol):
    """What has processes that answer. It is to be polled when something arrives."""

    def connections(self) -> list[Connection]:
        """What to wait on."""

    def next_deadline(self) -> float | None:
        """When to poll at the latest."""

    def poll(self, now: float) -> int:
        """Take what has been answered, and return how many that are."""


def wait_for(asked: Iterable[Asked]) -> None:
    """Until one of them has something to say, or is to be polled."""
    asked = list(asked)
    deadlines = [at for each in asked if (at := each.next_deadline()) is not None]
    patience = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
    wait([connection for each in asked for connection in each.connections()], patience)
