"""How a worker reads a run's store: as a file, or on Ray by asking the process that has the file.

    serve()                       in the process that has the file
    store_reader(config, dir)     in any process; both readers answer alike

A batch that several ranks ask for is read once, and fetched once to each node.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rhymeflow.config import Config
from rhymeflow.core.types import GroupId
from rhymeflow.store import damage
from rhymeflow.store.reader import Attempt, TrajectoryReader, TrajectoryRecord
from rhymeflow.store.schema import EVENTS
from rhymeflow.utils import objects
from rhymeflow.utils.objects import Reference

STORE = "store"

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

    def damage_of(path: str, error: Exception) -> str | None:
        return damage.damage_of(Path(path), error)

    for answer in (query, attempts, batch, damage_of):
        objects.here().offer(answer.__name__, answer)


class RemoteTrajectoryReader:
    """A store that the process `owner` reads; methods are those of `TrajectoryReader`."""

    def __init__(self, owner: str, path: Path) -> None:
        self.path = path
        self._objects, self._owner = objects.here(), owner

    def close(self) -> None:
        """Nothing is held."""

    def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Rows of one SQL statement."""
        found: list[tuple[Any, ...]] = self.ask("query", statement, values)
        return found

    def attempts(self) -> list[Attempt]:
        """The attempts at this run, in order."""
        found: list[Attempt] = self.ask("attempts")
        return found

    def batch(
        self, groups: Sequence[GroupId], members: Sequence[Sequence[int]]
    ) -> list[TrajectoryRecord]:
        """Records of these members of each group."""
        (packed,) = self._objects.get(self.ask("batch", groups, members))
        return _decoder.decode(packed.data)

    def ask(self, what: str, *arguments: Any) -> Any:
        """The owner's answer."""
        return self._objects.ask(self._owner, what, str(self.path), *arguments)


Reader = TrajectoryReader | RemoteTrajectoryReader
"""What workers read a store by."""


def store_reader(config: Config, run_dir: Path) -> Reader:
    """Of the store of the run in `run_dir`, a directory of the controller's machine."""
    path = run_dir / EVENTS
    if config.runtime == "ray":
        return RemoteTrajectoryReader(STORE, path)
    return TrajectoryReader(path)


def explained(reader: Reader) -> AbstractContextManager[None]:
    """Raise a `UserError` for an error in the block if the store is damaged, by the process that
    has the file."""
    if isinstance(reader, TrajectoryReader):
        return damage.explained(reader.path)
    return damage.explained(reader.path, lambda _, error: reader.ask("damage_of", error))
