"""What the reward worker and the environment worker share: a loop around processes of user code.

Holds true: while it serves, it makes progress at least every `WAIT_SECONDS`, however long user code
takes. Knows nothing of what is asked, nor of how it is answered.
"""

from __future__ import annotations

import time
from multiprocessing.connection import wait
from typing import Any, Generic, Protocol, TypeVar

from rhymeflow.utils import progress
from rhymeflow.workers.channel import Connection
from rhymeflow.workers.messages import WAIT_SECONDS, Message, receive

OutcomeT = TypeVar("OutcomeT")


class Executor(Protocol[OutcomeT]):
    """What starts, times and kills the processes of user code."""

    def poll(self, now: float) -> list[OutcomeT]:
        """What has come of requests since; `now` is `time.monotonic()`."""

    def next_deadline(self) -> float | None:
        """When something is to be done at the latest, on the same clock."""

    def connections(self) -> list[Any]:
        """To wait on: one is ready when a process has something to say."""


class UserCodeWorker(Generic[OutcomeT]):
    """Takes messages and answers them with what an executor's processes make of them."""

    def __init__(self, connection: Connection, executor: Executor[OutcomeT]) -> None:
        self._connection, self._executor = connection, executor
        self._ending = False

    def serve(self) -> None:
        """Receive messages, send answers, until one of them ends it."""
        progress.has_started = True
        while not self._ending:
            self._wait()
            self.turn()
            progress.advance()

    def turn(self) -> None:
        """Receive what has arrived, and send the answers that there are."""
        while not self._ending and self._connection.poll(0.0):
            self._take(receive(self._connection))
        for outcome in self._executor.poll(time.monotonic()):
            self._answer(outcome)

    def _wait(self) -> None:
        """Until there is something to do, or for a while."""
        deadline, patience = self._executor.next_deadline(), WAIT_SECONDS
        if deadline is not None:
            patience = min(patience, max(0.0, deadline - time.monotonic()))
        to_read: list[Any] = [self._connection, *self._executor.connections()]
        wait(to_read, patience)

    def _take(self, message: Message) -> None:
        """Do what a message asks for; `Shutdown` sets `_ending`."""
        raise NotImplementedError

    def _answer(self, outcome: OutcomeT) -> None:
        """Send what became of a request."""
        raise NotImplementedError
