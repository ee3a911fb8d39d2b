"""The actor beside the run's store, which answers workers on all nodes.

Holds true: it is on the controller's node, where the file is; it only reads, so Ray may start it
anew and repeat what was asked. Knows nothing of what is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rhymeflow.runtime.ray.objects import RayObjects
from rhymeflow.store import remote
from rhymeflow.utils import objects


class StoreActor:
    """Answers for the stores that its node has."""

    def __init__(self, namespace: str) -> None:
        self._objects = RayObjects(remote.STORE, namespace)
        objects.use(self._objects)
        remote.serve()

    def answer(self, what: str, arguments: Sequence[Any]) -> Any:
        """What a worker's `objects.ask` gets."""
        return self._objects.answer(what, arguments)


__all__ = ["StoreActor"]
