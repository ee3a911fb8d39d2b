"""The actors of a run: they carry messages, share objects and answer each other's requests.

A worker's actor runs the same `main` as a local process, in a thread. A buffer goes to each node's
object store once. Each run has a namespace of its own on the cluster. `OwnerLost` is raised for an
actor that is gone or cannot be reached."""

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

ASKED = "asked"  # the concurrency group of an actor's `answer`: one thread beside its others


class RayObjects:
    """The `objects.Objects` of the actor `name`, whose method `answer` calls this one's."""

    def __init__(self, name: str, namespace: str) -> None:
        self.name, self._namespace = name, namespace
        self._offered: dict[str, Callable[..., Any]] = {}

    @property
    def address(self) -> str:
        """This node's address for other nodes."""
        return ray.util.get_node_ip_address()

    @property
    def join(self) -> Callable[[], None]:
        """A function that makes a process of this node a driver; see `objects.Objects`."""
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

    def offer(self, name: str, function: Callable[..., Any]) -> None:
        """Let other processes call `function`; see `objects.Objects`."""
        self._offered[name] = function

    def answer(self, name: str, arguments: Sequence[Any]) -> Any:
        """Call an offered function."""
        return self._offered[name](*arguments)

    def ask(self, owner: str, name: str, *arguments: Any) -> Any:
        """Call a function that the actor `owner` offers; see `objects.Objects`."""
        try:
            actor = ray.get_actor(owner, namespace=self._namespace)
        except ValueError:
            raise OwnerLost(f"there is no actor {owner}") from None
        try:
            return ray.get(actor.answer.options(concurrency_group=ASKED).remote(name, arguments))
        except RayTaskError as error:
            raise error.cause from None  # the original error, without Ray's wrapper
        except RayActorError as error:
            raise OwnerLost(_first_line(error)) from None


class StoreActor:
    """Reads the controller's store for workers, so Ray may restart it and repeat calls."""

    def __init__(self, namespace: str) -> None:
        self._objects = RayObjects(handle.STORE, namespace)
        objects.use(self._objects)
        handle.serve()

    def answer(self, name: str, arguments: Sequence[Any]) -> Any:
        """Answer a worker's `objects.ask`."""
        return self._objects.answer(name, arguments)


def _join(cluster: str, node_address: str, namespace: str) -> None:
    """Make this process a driver. It has no name, since it answers no requests."""
    ray.init(cluster, _node_ip_address=node_address, **QUIET)
    objects.use(RayObjects("", namespace))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


class Placement(NamedTuple):
    """The node and process that an actor runs in."""

    node: str
    host: str
    pid: int


class WorkerActor:
    """The process of one worker, which sends and receives through a pipe; `deliver` and `collect`,
    each in a thread, carry its messages. Its last messages are collected before its end. `first` is
    not used: Ray waits for it before it starts the actor."""

    def __init__(self, setup: entry.WorkerSetup, namespace: str, first: object = None) -> None:
        entry.set_num_threads(setup.num_threads)
        assert "torch" not in sys.modules
        # Spawned processes would import the main module, Ray's program, which takes seconds.
        sys.modules["__main__"] = ModuleType("__main__")
        self._objects = RayObjects(setup.name, namespace)
        objects.use(self._objects)
        ours, theirs = multiprocessing.Pipe(duplex=True)
        self._channel = Channel(ours)
        self._setup, self._theirs = setup, theirs
        threading.Thread(target=self._work, daemon=True, name=setup.name).start()

    def placement(self) -> Placement:
        """Return where the actor runs, as soon as its process has started."""
        node = ray.get_runtime_context().get_node_id()
        return Placement(node, socket.gethostname(), os.getpid())

    def deliver(self, messages: list[bytes]) -> None:
        """Pass messages to the worker; drop them if it has ended."""
        with suppress(BrokenPipeError, ConnectionResetError):
            for message in messages:
                self._channel.send_bytes(message)

    def collect(self) -> list[bytes] | None:
        """Wait for the worker's messages; None: it has ended."""
        messages = []
        with suppress(EOFError, ConnectionResetError):
            messages.append(self._channel.recv_bytes())
            while self._channel.poll():
                messages.append(self._channel.recv_bytes())
        return messages or None

    def answer(self, name: str, arguments: Sequence[Any]) -> Any:
        """Answer another process's `objects.ask`."""
        return self._objects.answer(name, arguments)

    def _work(self) -> None:
        try:
            entry.work(self._theirs, self._setup)
        finally:
            self._theirs.close()
