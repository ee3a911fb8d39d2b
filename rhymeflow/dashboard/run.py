"""One run as the dashboard knows it: its directory, its store, and its metrics by column.

Nothing in the files is changed. What is wrong with them is one `UserError` for whoever asks, and
does not end the server.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from rhymeflow.dashboard.summaries import Summaries
from rhymeflow.dashboard.timeline import LogNames, Timeline
from rhymeflow.observe.metrics import FILE, Columns
from rhymeflow.store.damage import explained
from rhymeflow.store.previous_run import store_of
from rhymeflow.store.reader import TrajectoryReader

Made = TypeVar("Made", Summaries, Timeline, LogNames)


class Kept(Generic[Made]):
    """What is computed from all of a store, kept in memory between questions.

    It is made anew when another file is in the store's place.
    """

    def __init__(self, store: Path, make: Callable[[TrajectoryReader], Made]) -> None:
        self._store, self._make = store, make
        self._lock = threading.Lock()
        self._made: Made | None = None
        self._identity = (0, 0)

    @contextlib.contextmanager
    def current(self) -> Iterator[Made]:
        """The object, for one thread at a time.

        Raises:
            UserError: the store cannot be read.
        """
        with self._lock, explained(self._store):
            there = self._store.stat() if self._store.exists() else None
            identity = (there.st_dev, there.st_ino) if there else (0, 0)
            if self._made is None or identity != self._identity:
                if self._made is not None:
                    self._made.reader.close()
                self._made = None
                self._made = self._make(TrajectoryReader(self._store))
                self._identity = identity
            yield self._made


class Run:
    """A run directory; `name` is what addresses call it.

    Raises:
        UserError: there is no run in it.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.store = store_of(directory)
        self.directory, self.name = directory, name
        self.columns = Columns(directory / FILE)
        """Of `metrics.jsonl`."""
        self._summaries = Kept(self.store, Summaries)
        self.timeline = Kept(self.store, Timeline)
        """What went on when."""
        self.log_names = Kept(self.store, LogNames)

    @contextlib.contextmanager
    def reader(self) -> Iterator[TrajectoryReader]:
        """The store.

        Raises:
            UserError: it cannot be read.
        """
        with explained(self.store), contextlib.closing(TrajectoryReader(self.store)) as reader:
            yield reader

    @contextlib.contextmanager
    def summaries(self) -> Iterator[Summaries]:
        """All groups as they are now.

        Raises:
            UserError: the store cannot be read.
        """
        with self._summaries.current() as found:
            found.refresh()
            yield found


__all__ = ["Kept", "Run"]
