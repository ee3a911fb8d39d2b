"""The controller's side of one actor: a `base.WorkerHandle`.

Holds true: what was sent goes with the next `hand_over`, in one call; one call of `collect` is
under way at any time, whose end is put into the runtime's queue. Calls of one kind are carried out
in the order in which they were made, and none twice: an actor has one thread for each kind, is
never restarted, and no call is tried again.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rhymeflow.runtime.ray.actor import Whereabouts
from rhymeflow.runtime.ray.objects import ASKED
from rhymeflow.workers.messages import Message, encode

GROUPS = {"in": 1, "out": 1, ASKED: 1}
"""Threads of an actor for each kind of call."""


Arrived = SimpleQueue[tuple[str, Future[Any] | None]]
"""Names of workers, with what a call of `collect` came to; None: now it is known where it is."""


class RayWorker:
    """A worker that is an actor. Whatever is heard of it comes into `arrived`."""

    def __init__(self, name: str, actor: Any, log: Path, arrived: Arrived) -> None:
        self.name, self.actor = name, actor
        self._log, self._arrived = log, arrived
        self._sent: list[bytes] = []
        self._deliver = actor.deliver.options(concurrency_group="in")
        self._collect = actor.collect.options(concurrency_group="out")
        self._where: Future[Whereabouts] = actor.where.remote().future()
        self.asked_for = time.monotonic()
        self.is_heard = False
        self.ended = threading.Event()
        """It has ended, by itself or by force, or nothing is known of it any more."""

    @property
    def log(self) -> str:
        """The file that has what it prints, and on which machine."""
        if self._where.done() and self._where.exception() is None:
            return f"{self._log} on {self._where.result().host}"
        return f"{self._log} on its node"

    @property
    def node(self) -> str | None:
        """Ray's id of its node; known before anything is heard of it."""
        if self._where.done() and self._where.exception() is None:
            return self._where.result().node
        return None

    @property
    def pid(self) -> int:
        """Process id on its node; waits until it runs."""
        return self._where.result().pid

    @property
    def is_placed(self) -> bool:
        """Whether it has a process, or never will have."""
        return self._where.done()

    def send(self, message: Message) -> None:
        """Send a message with the next `hand_over`; see `base.WorkerHandle`."""
        self._sent.append(encode(message))

    def hand_over(self) -> None:
        """Let what was sent go. All of a turn at once: a call costs a part of a millisecond."""
        if self._sent:
            self._deliver.remote(self._sent)
            self._sent = []

    def begin(self) -> None:
        """Have the runtime know when it is known where it is; then it is to be listened to."""
        self._where.add_done_callback(lambda _: self._arrived.put((self.name, None)))

    def listen(self) -> None:
        """Wait for what it says next, in the background."""
        self.is_heard = True
        self._collect.remote().future().add_done_callback(self._take)

    def _take(self, said: Future[Any]) -> None:
        if said.exception() is not None or said.result() is None:
            self.ended.set()
        self._arrived.put((self.name, said))


__all__ = ["GROUPS", "Arrived", "RayWorker"]
