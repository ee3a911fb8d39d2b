"""What a transport may do with messages: deliver some twice, and late.

What was not acknowledged when a connection breaks is sent again over the next one, though some may
have arrived. So a channel is late as a whole, and after a message the last few that were delivered
may come once more, in order. Nothing is lost, and nothing new comes out of order.
"""

from __future__ import annotations

import random
from collections import deque

MEMORY = 4
"""Messages that may be on their way without having been acknowledged."""


class Transport:
    """One direction of a channel.

    `twice` and `late`: how many of the messages are followed by a repetition, or delayed, from 0
    to 1. `seconds`: mean and most of a delay.
    """

    def __init__(
        self, rng: random.Random, *, twice: float, late: float, seconds: tuple[float, float]
    ) -> None:
        self._rng, self._twice, self._late, self._seconds = rng, twice, late, seconds
        self._unacknowledged: deque[bytes] = deque(maxlen=MEMORY)
        self.num_twice = 0
        """Messages that were delivered again, so far."""

    def delay(self) -> float:
        """Seconds that the channel stands still before the next message."""
        if self._rng.random() >= self._late:
            return 0.0
        mean, most = self._seconds
        return min(self._rng.expovariate(1 / mean), most)

    def deliver(self, message: bytes) -> list[bytes]:
        """What comes out for this message."""
        self._unacknowledged.append(message)
        if self._rng.random() >= self._twice:
            return [message]
        count = self._rng.randint(1, len(self._unacknowledged))
        self.num_twice += count
        return [message, *list(self._unacknowledged)[-count:]]
