"""What the controller says to an instance, in its order, while some of it has to wait.

Holds true: messages are taken in the order in which they came, but that news of another learner may
be taken before what came earlier. Knows nothing of what is done with them.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from rhymeflow.workers.channel import Connection
from rhymeflow.workers.messages import ConnectWeights, Shutdown, receive


class Inbox:
    """Messages that arrive by `connection`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._later: deque[Any] = deque()

    def next(self, wait: float) -> Any | None:
        """The next message; None if none comes for so many seconds."""
        if self._later:
            return self._later.popleft()
        return receive(self._connection) if self._connection.poll(wait) else None

    def next_learner(self, wait: float) -> ConnectWeights | Shutdown | None:
        """The next that says where weights are, or that the run ends; others stay for `next`."""
        while self._connection.poll(wait):
            message = receive(self._connection)
            if isinstance(message, ConnectWeights | Shutdown):
                return message
            self._later.append(message)
        return None
