"""Objects and questions by Ray: its object store, and a method of named actors.

A buffer goes through the object store of each node once; names are of one run, so runs of one
cluster do not meet. An actor that is gone, and one that cannot be reached, are both `OwnerLost`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from rhymeflow.runtime.ray.library import QUIET
from rhymeflow.store import handle
from rhymeflow.utils import objects
from rhymeflow.utils.objects import OwnerLost, Reference

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
    """Answers for the stores that its node has, which is the controller's. It only reads, so Ray
    may start it anew and repeat what was asked."""

    def __init__(self, namespace: str) -> None:
        self._objects = RayObjects(handle.STORE, namespace)
        objects.use(self._objects)
        handle.serve()

    def answer(self, what: str, arguments: Sequence[Any]) -> Any:
        """What a worker's `objects.ask` gets."""
        return self._objects.answer(what, arguments)


def _join(cluster: str, node_address: str, namespace: str) -> None:
    """Nobody asks a process that joined: it has no name."""
    ray.init(cluster, _node_ip_address=node_address, **QUIET)
    objects.use(RayObjects("", namespace))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
