"""Lets the first instances of an attempt join together.

The first to join would get the whole first batch, although the others join soon after."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rhymeflow.core.events import InstanceJoined
from rhymeflow.core.types import InstanceId

LEAST_SECONDS = 5.0
"""Least time that those which have loaded wait for the others; it is longer if it took longer until
the first had."""


class FirstInstances:
    """Holds instances back until `expected` are there, or have had the time. Times are seconds of
    one clock, by which the attempt began at `began`."""

    def __init__(self, began: float) -> None:
        self._began, self._until = began, math.inf
        self._waiting: dict[InstanceId, InstanceJoined] = {}
        self._have_joined = False

    def join(self, joined: InstanceJoined, now: float) -> None:
        """Hold back an instance that has loaded."""
        if not self._waiting:
            self._until = now + max(now - self._began, LEAST_SECONDS)
        self._waiting[joined.instance] = joined

    def leave(self, name: InstanceId) -> None:
        """Forget an instance that is lost."""
        self._waiting.pop(name, None)

    def joined(self, expected: int, now: float) -> Iterator[InstanceJoined]:
        """Yield the instances that join now; once some have, each joins at once."""
        is_time = self._have_joined or len(self._waiting) >= expected or now >= self._until
        if self._waiting and is_time:
            self._have_joined = True
            yield from self._waiting.values()
            self._waiting.clear()
