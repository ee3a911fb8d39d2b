"""Reading a store from another node: one process beside the file answers, batches go by reference.

    serve()                                 in the process beside the file
    RemoteTrajectoryReader(owner, path)     anywhere else in the cluster

Holds true: what is answered is what `TrajectoryReader` says, and an error is raised where it was
asked; a batch that several ranks ask for is read once, and fetched once to each node. Knows nothing
of what is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rhymeflow.core.types import GroupId
from rhymeflow.store.damage import damage_of
from rhymeflow.store.reader import Attempt, TrajectoryReader, TrajectoryRecord
from rhymeflow.utils import objects
from rhymeflow.utils.objects import Reference

STORE = "store"
"""Name of the process that answers."""

_decoder = msgspec.msgpack.Decoder(list[TrajectoryRecord])


def serve() -> None:
    """Answer questions about the stores that this process can open, in one thread."""
    opened = cache(TrajectoryReader)
    last: tuple[Any, Reference] | None = None

    def query(path: str, statement: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        return opened(path).query(statement, *values)

    def attempts(path: str) -> list[Attempt]:
        return opened(path).attempts()

    def batch(
        path: str, groups: Sequence[GroupId], members: Sequence[Sequence[int]]
    ) -> list[Reference]:
        nonlocal last
        asked = path, groups, members
        if last is None or last[0] != asked:
            records = opened(path).batch(groups, members)
            packed = np.frombuffer(msgspec.msgpack.encode(records), np.uint8)
            last = asked, objects.here().put(packed)
        return [last[1]]  # in something: else it would arrive as what it refers to

    def damage(path: str, error: Exception) -> str | None:
        return damage_of(Path(path), error)

    for answer in (query, attempts, batch, damage):
        objects.here().offer(answer.__name__, answer)


class RemoteTrajectoryReader:
    """A view of a store that `owner` answers for; the same questions as of `TrajectoryReader`."""

    def __init__(self, owner: str, path: Path) -> None:
        self.path = path
        self._objects, self._owner = objects.here(), owner

    def close(self) -> None:
        """Nothing is held."""

    def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Rows of one SQL statement; see `TrajectoryReader`."""
        found: list[tuple[Any, ...]] = self._ask("query", statement, values)
        return found

    def attempts(self) -> list[Attempt]:
        """The attempts at this run, in order."""
        found: list[Attempt] = self._ask("attempts")
        return found

    def batch(
        self, groups: Sequence[GroupId], members: Sequence[Sequence[int]]
    ) -> list[TrajectoryRecord]:
        """Records of these members of each group; see `TrajectoryReader`."""
        references = self._ask("batch", groups, members)
        (packed,) = self._objects.get(references)
        return _decoder.decode(packed.data)

    def damage(self, error: Exception) -> str | None:
        """What is wrong with the file; see `damage_of`."""
        found: str | None = self._ask("damage", error)
        return found

    def _ask(self, what: str, *arguments: Any) -> Any:
        return self._objects.ask(self._owner, what, str(self.path), *arguments)


__all__ = ["STORE", "RemoteTrajectoryReader", "serve"]
