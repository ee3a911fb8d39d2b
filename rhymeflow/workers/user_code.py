"""The loop around a pool of processes that the reward and environment workers share."""

from __future__ import annotations

import time
from typing import Any

from rhymeflow.pool import Pool
from rhymeflow.utils import progress
from rhymeflow.workers.channel import Channel
from rhymeflow.workers.messages import WAIT_SECONDS, Message, Printed, Shutdown, receive, send


class UserCodeWorker:
    """Submits messages to a pool of processes and sends the results."""

    def __init__(self, connection: Channel, pool: Pool) -> None:
        self._connection, self._pool = connection, pool
        self._ending = False

    def serve(self) -> None:
        """Serve until `Shutdown`, with progress every `WAIT_SECONDS` while user code runs."""
        progress.has_started = True
        while not self._ending:
            self._pool.wait(WAIT_SECONDS, self._connection)
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
        for task in self._pool.poll(time.monotonic()):
            self._answer(task)

    def _take(self, message: Message) -> None:
        """Handle a message other than `Shutdown`."""
        raise NotImplementedError

    def _answer(self, task: Any) -> None:
        """Send the result of a task."""
        raise NotImplementedError
