"""One run of the dashboard, and data about it that stays in memory. Damaged files raise a
`UserError` for the request, and do not end the server."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rhymeflow.observe.metrics import FILE, LiveRows
from rhymeflow.observe.query import LiveVerdicts
from rhymeflow.store.damage import explained
from rhymeflow.store.previous_run import store_of
from rhymeflow.store.reader import TrajectoryReader


class Kept(Protocol):
    """Data that is computed from a whole store and updated as the store grows."""

    reader: TrajectoryReader

    def follow(self) -> None:
        """Read what the store has got since the last call."""


Made = TypeVar("Made", bound=Kept)


class Run:
    """A run directory; `name` is what addresses call it. `UserError` if there is no run in it."""

    def __init__(self, directory: Path, name: str) -> None:
        self.store = store_of(directory)
        self.directory, self.name = directory, name
        self.metrics, self.verdicts = LiveRows(directory / FILE), LiveVerdicts()
        self._kept: dict[Any, tuple[Any, Any]] = {}
        self._locks: dict[Any, threading.Lock] = {}

    @contextlib.contextmanager
    def reader(self) -> Iterator[TrajectoryReader]:
        """Open the store. Raises `UserError` if it cannot be read."""
        with explained(self.store), contextlib.closing(TrajectoryReader(self.store)) as reader:
            yield reader

    @contextlib.contextmanager
    def kept(self, make: Callable[[TrajectoryReader], Made]) -> Iterator[Made]:
        """Yield the up-to-date result of `make` to one thread at a time. It is kept in memory
        between requests, and computed anew if the store is replaced. Raises `UserError` if the
        store cannot be read."""
        with self._locks.setdefault(make, threading.Lock()), explained(self.store):
            status = self.store.stat() if self.store.exists() else None
            identity = status and (status.st_dev, status.st_ino)
            if make in self._kept and self._kept[make][0] != identity:
                self._kept.pop(make)[1].reader.close()
            if make not in self._kept:
                self._kept[make] = identity, make(TrajectoryReader(self.store))
            kept = self._kept[make][1]
            kept.follow()
            yield kept
