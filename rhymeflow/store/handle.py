"""Lets workers read a run's store: as a file, or on Ray through the process that has the file.

    serve()                       in the process that has the file
    store_reader(config, dir)     in any process; both kinds of reader give the same results

A batch that several ranks ask for is read once and sent once to each node."""

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
    """Offer this process's stores to `RemoteTrajectoryReader`s; one thread answers them."""
    open_reader = cache(TrajectoryReader)
    last: tuple[Any, Reference] | None = None  # the last request for a batch, and the batch

    def query(path: str, statement: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        return open_reader(path).query(statement, *values)

    def attempts(path: str) -> list[Attempt]:
        return open_reader(path).attempts()

    def batch(
        path: str, groups: Sequence[GroupId], members: Sequence[Sequence[int]]
    ) -> list[Reference]:
        nonlocal last
        request = path, groups, members
        if last is None or last[0] != request:
            records = open_reader(path).batch(groups, members)
            packed = np.frombuffer(msgspec.msgpack.encode(records), np.uint8)
            last = request, objects.here().put(packed)
        return [last[1]]  # in a list: a bare reference would arrive as the object itself

    def damage_of(path: str, error: Exception) -> str | None:
        return damage.damage_of(Path(path), error)

    for method in (query, attempts, batch, damage_of):
        objects.here().offer(method.__name__, method)


class RemoteTrajectoryReader:
    """Reads a store through the process `owner`, with methods of `TrajectoryReader`."""

    def __init__(self, owner: str, path: Path) -> None:
        self.path = path
        self._objects, self._owner = objects.here(), owner

    def close(self) -> None:
        """Do nothing: no file is open here."""

    def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of one SQL statement."""
        return self.ask("query", statement, values)

    def attempts(self) -> list[Attempt]:
        """Return the attempts at this run, in order."""
        return self.ask("attempts")

    def batch(
        self, groups: Sequence[GroupId], members: Sequence[Sequence[int]]
    ) -> list[TrajectoryRecord]:
        """Return records of these members of each group; see `TrajectoryReader.batch`."""
        (packed,) = self._objects.get(self.ask("batch", groups, members))
        return _decoder.decode(packed.data)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call one of the methods that `serve` offers, and return its result."""
        return self._objects.ask(self._owner, method, str(self.path), *arguments)


Reader = TrajectoryReader | RemoteTrajectoryReader


def store_reader(config: Config, run_dir: Path) -> Reader:
    """Return a reader of the run in `run_dir`, a directory on the controller's machine."""
    path = run_dir / EVENTS
    if config.runtime == "ray":
        return RemoteTrajectoryReader(STORE, path)
    return TrajectoryReader(path)


def explained(reader: Reader) -> AbstractContextManager[None]:
    """Turn an error in the block into a `UserError` if the store is damaged. The process that has
    the file looks for the damage."""
    if isinstance(reader, TrajectoryReader):
        return damage.explained(reader.path)
    return damage.explained(reader.path, lambda _, error: reader.ask("damage_of", error))
