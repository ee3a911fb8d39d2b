"""The actors of a run, and how they share objects and answer each other's questions.

A worker's actor runs the same `main` as a process does, in a thread. A buffer goes through each
node's object store once. Names are of one run, so runs of one cluster do not meet; an actor that
is gone, and one that cannot be reached, are both `OwnerLost`.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from rhymeflow.runtime.ray.library import QUIET
from rhymeflow.store import handle
from rhymeflow.utils import objects
from rhymeflow.utils.objects import OwnerLost, Reference
from rhymeflow.workers import entry
from rhymeflow.workers.channel import Channel

ASKED = "asked"
"""The concurrency group of an actor's `answer`: one thread, beside what else it does."""


class RayObjects:
    """An `objects.Objects` of the actor `name`, whose method `answer` calls this one's."""

    def __init__(self, name: str, namespace: str) -> None:
        self.name, self._namespace = name, namespace
        self._answers: dict[str, Callable[..., Any]] = {}

    @property
    def address(self) -> str:
        """Where other nodes reach this one."""
        address: str = ray.util.get_node_ip_address()
        return address

    @property
    def join(self) -> Callable[[], None]:
        """Have a process of this node be a driver of the cluster; see `objects.Objects`."""
        context = ray.get_runtime_context()
        return partial(_join, context.gcs_address, self.address, self._namespace)

    def put(self, data: np.ndarray) -> Reference:
        """Keep a copy of the bytes; see `objects.Objects`."""
        return Reference(ray.put(data))

    def get(self, references: Sequence[Reference]) -> list[np.ndarray]:
        """Views of this node's object store; see `objects.Objects`."""
        try:
            buffers: list[np.ndarray] = ray.get(list(references))
        except (ObjectLostError, RayActorError) as error:
            raise OwnerLost(_first_line(error)) from None
        return buffers

    def offer(self, what: str, answer: Callable[..., Any]) -> None:
        """Answer questions of this name; see `objects.Objects`."""
        self._answers[what] = answer

    def answer(self, what: str, arguments: Sequence[Any]) -> Any:
        """What this process answers."""
        return self._answers[what](*arguments)

    def ask(self, whom: str, what: str, *arguments: Any) -> Any:
        """What the actor `whom` answers; see `objects.Objects`."""
        try:
            actor = ray.get_actor(whom, namespace=self._namespace)
        except ValueError:
            raise OwnerLost(f"there is no actor {whom}") from None
        try:
            return ray.get(actor.answer.options(concurrency_group=ASKED).remote(what, arguments))
        except RayTaskError as error:
            raise error.cause from None  # as it was raised there, without Ray's account of it
        except RayActorError as error:
            raise OwnerLost(_first_line(error)) from None


class StoreActor:
    """Answers questions to the controller's store. It only reads, so Ray may restart it and repeat
    questions."""

    def __init__(self, namespace: str) -> None:
        self._objects = RayObjects(handle.STORE, namespace)
        objects.use(self._objects)
        handle.serve()

    def answer(self, what: str, arguments: Sequence[Any]) -> Any:
        """What a worker's `objects.ask` gets."""
        return self._objects.answer(what, arguments)


def _join(cluster: str, node_address: str, namespace: str) -> None:
    """A process that joined has no name: it is asked nothing."""
    ray.init(cluster, _node_ip_address=node_address, **QUIET)
    objects.use(RayObjects("", namespace))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


class Whereabouts(NamedTuple):
    """Where an actor runs."""

    node: str
    host: str
    pid: int


class WorkerActor:
    """The process of one worker, which talks through a pipe; `deliver` and `collect`, each in a
    thread, carry its messages. All that it said is collected before its end."""

    def __init__(self, given: entry.Given, namespace: str) -> None:
        os.environ["OMP_NUM_THREADS"] = str(given.num_threads)  # torch reads it when it is imported
        assert "torch" not in sys.modules
        # Processes that it spawns import the main module: Ray's program, which takes seconds.
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
        """Hand messages to the worker; after its end they are dropped."""
        with suppress(BrokenPipeError, ConnectionResetError):
            for message in messages:
                self._channel.send_bytes(message)

    def collect(self) -> list[bytes] | None:
        """Wait for the worker's messages; None: it has ended."""
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
