"""One run of the dashboard, and what is kept in memory of it. What is wrong with its files is a
`UserError` of the question, and does not end the server."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rhymeflow.observe.metrics import Followed
from rhymeflow.store.damage import explained
from rhymeflow.store.previous_run import store_of
from rhymeflow.store.reader import TrajectoryReader


class Kept(Protocol):
    """What is computed from all of a store."""

    reader: TrajectoryReader

    def follow(self) -> None:
        """Take in what the store has more."""


Made = TypeVar("Made", bound=Kept)


class Run:
    """A run directory; `name` is what addresses call it. `UserError` if there is no run in it."""

    def __init__(self, directory: Path, name: str) -> None:
        self.store = store_of(directory)
        self.directory, self.name = directory, name
        self.metrics = Followed(directory)
        self._kept: dict[Any, tuple[Any, Any]] = {}
        self._locks: dict[Any, threading.Lock] = {}

    @contextlib.contextmanager
    def reader(self) -> Iterator[TrajectoryReader]:
        """The store. Raises `UserError` if it cannot be read."""
        with explained(self.store), contextlib.closing(TrajectoryReader(self.store)) as reader:
            yield reader

    @contextlib.contextmanager
    def kept(self, make: Callable[[TrajectoryReader], Made]) -> Iterator[Made]:
        """What `make` made, up to date, for one thread at a time. It is kept in memory between
        questions, and made anew when the store is another file.

        Raises:
            UserError: the store cannot be read.
        """
        with self._locks.setdefault(make, threading.Lock()), explained(self.store):
            there = self.store.stat() if self.store.exists() else None
            identity = there and (there.st_dev, there.st_ino)
            if make in self._kept and self._kept[make][0] != identity:
                self._kept.pop(make)[1].reader.close()
            if make not in self._kept:
                self._kept[make] = identity, make(TrajectoryReader(self.store))
            found = self._kept[make][1]
            found.follow()
            yield found
