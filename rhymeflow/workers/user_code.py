"""The loop around a pool of processes that the reward and environment workers share."""

from __future__ import annotations

import math
import time
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any

from rhymeflow.pool import Pool
from rhymeflow.utils import progress
from rhymeflow.workers.channel import Channel
from rhymeflow.workers.messages import WAIT_SECONDS, Message, Printed, Shutdown, receive, send

if TYPE_CHECKING:
    from rhymeflow.environments.agents import Agents


class UserCodeWorker:
    """Submits messages to a pool of processes and sends the results."""

    latency = 0.0  # seconds that an answer takes at least, as on an emulated cluster

    def __init__(self, connection: Channel, pool: Pool | Agents) -> None:
        self._connection, self._pool = connection, pool
        self._ending = False
        self._early: list[tuple[float, int, Any]] = []
        """Heap of tasks that are done too soon: when they are due, their place, they."""
        self._numbers = count()

    def serve(self) -> None:
        """Serve until `Shutdown`, with progress every `WAIT_SECONDS` while user code runs."""
        progress.has_started = True
        while not self._ending:
            due = self._early[0][0] if self._early else math.inf
            self._pool.wait(min(WAIT_SECONDS, max(due - time.monotonic(), 0.0)), self._connection)
            self.turn()
            if (line := self._pool.first_print()) is not None:
                send(self._connection, Printed(line))
            progress.advance()

    def turn(self) -> None:
        """Receive the messages that have arrived, and send the answers that are ready."""
        while not self._ending and self._connection.poll(0.0):
            message = receive(self._connection)
            if isinstance(message, Shutdown):
                self._ending = True
            else:
                self._take(message)
        now = time.monotonic()
        for task in self._pool.poll(now):
            heappush(self._early, (task.submitted + self.latency, next(self._numbers), task))
        while self._early and self._early[0][0] <= now:
            send(self._connection, self._reply(heappop(self._early)[2]))

    def _submit(self, task: Any) -> None:
        task.submitted = time.monotonic()
        self._pool.submit(task)

    def _take(self, message: Message) -> None:
        """Handle a message other than `Shutdown`."""
        raise NotImplementedError

    def _reply(self, task: Any) -> Message:
        """Return the result of a task."""
        raise NotImplementedError
