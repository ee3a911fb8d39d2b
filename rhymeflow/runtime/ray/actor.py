"""A worker as an actor: the same `main` as on one machine, in a thread of the actor's process.

`main` has one end of a pipe, and the actor's methods carry what goes through the other to the
controller and back. `deliver` and `collect` wait for nobody but `main`, and each has a thread of
its own; what `main` had said before it ended is collected before its end.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple

import ray

from rhymeflow.runtime.ray.objects import RayObjects
from rhymeflow.utils import objects
from rhymeflow.workers import entry
from rhymeflow.workers.channel import Channel


class Whereabouts(NamedTuple):
    """Where an actor runs."""

    node: str
    host: str
    pid: int


class WorkerActor:
    """The process of one worker; it is there before the worker is up."""

    def __init__(self, given: entry.Given, namespace: str) -> None:
        os.environ["OMP_NUM_THREADS"] = str(given.num_threads)  # torch reads it when it is imported
        assert "torch" not in sys.modules
        # Processes that the worker spawns import the main module again: Ray's program, which takes
        # seconds and is of no use to them.
        sys.modules["__main__"] = ModuleType("__main__")
        self._objects = RayObjects(given.name, namespace)
        objects.use(self._objects)
        ours, theirs = multiprocessing.Pipe(duplex=True)
        self._channel = Channel(ours)
        self._given, self._theirs = given, theirs
        threading.Thread(target=self._work, daemon=True, name=given.name).start()

    def where(self) -> Whereabouts:
        """Answers as soon as the process is there."""
        node = ray.get_runtime_context().get_node_id()
        return Whereabouts(node, socket.gethostname(), os.getpid())

    def deliver(self, messages: list[bytes]) -> None:
        """Hand messages to the worker; those that come after its end are dropped."""
        with suppress(BrokenPipeError, ConnectionResetError):
            for message in messages:
                self._channel.send_bytes(message)

    def collect(self) -> list[bytes] | None:
        """Wait until the worker has said something; all of it. None: it has ended."""
        said = []
        with suppress(EOFError, ConnectionResetError):
            said.append(self._channel.recv_bytes())
            while self._channel.poll():
                said.append(self._channel.recv_bytes())
        return said or None

    def answer(self, what: str, arguments: Sequence[Any]) -> Any:
        """What another process's `objects.ask` gets."""
        return self._objects.answer(what, arguments)

    def _work(self) -> None:
        try:
            entry.work(self._theirs, self._given)
        finally:
            self._theirs.close()
