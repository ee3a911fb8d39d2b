"""What the reward worker and the environment worker share: a loop around a pool of processes."""

from __future__ import annotations

import time
from typing import Any

from rhymeflow.pool import Pool
from rhymeflow.utils import progress
from rhymeflow.workers.channel import Channel
from rhymeflow.workers.messages import WAIT_SECONDS, Message, Shutdown, receive


class UserCodeWorker:
    """Takes messages and answers them with what a pool's processes make of them."""

    def __init__(self, connection: Channel, pool: Pool) -> None:
        self._connection, self._pool = connection, pool
        self._ending = False

    def serve(self) -> None:
        """Serve until `Shutdown`, with progress every `WAIT_SECONDS` while user code runs."""
        progress.has_started = True
        while not self._ending:
            self._pool.wait(WAIT_SECONDS, self._connection)
            self.turn()
            progress.advance()

    def turn(self) -> None:
        """Receive what has arrived, and send the answers that there are."""
        while not self._ending and self._connection.poll(0.0):
            message = receive(self._connection)
            if isinstance(message, Shutdown):
                self._ending = True
            else:
                self._take(message)
        for task in self._pool.poll(time.monotonic()):
            self._answer(task)

    def _take(self, message: Message) -> None:
        """Do what a message asks for."""
        raise NotImplementedError

    def _answer(self, task: Any) -> None:
        """Send what became of a task."""
        raise NotImplementedError
