"""One run as the dashboard knows it: its directory, its side index, and its metrics by column.

Holds true: what it says is what the files said at some moment not longer ago than the last
`refresh`; nothing in them is changed but the side index. What is wrong with them is one
`UserError` of whoever asks, and does not end the server.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rhymeflow.dashboard.side_index import SideIndex
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from rhymeflow.store.damage import explained
from rhymeflow.store.previous_run import store_of
from rhymeflow.store.reader import TrajectoryReader

REFRESH_SECONDS = 0.75
KEPT_SECONDS = 10.0
"""After the last question."""
PATIENCE, PATIENT_BYTES = 0.3, 16 * 1024 * 1024
"""Seconds from the first question on for which the index of a store up to this size is waited for
to be full; of a larger one that would take longer. Then questions are answered from what there is.
"""


class Run:
    """A run directory; `name` is what addresses call it.

    Raises:
        UserError: there is no run in it.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.store = store_of(directory)
        self.directory, self.name = directory, name
        self.side = SideIndex(directory)
        self._keeper = Keeper(self.side)
        self._metrics = MetricColumns(directory / metrics.FILE)

    @contextlib.contextmanager
    def reader(self) -> Iterator[TrajectoryReader]:
        """The store with the side index attached, as far as that is filled; the side index is kept
        up in a thread of its own for as long as somebody asks.

        Raises:
            UserError: what is asked cannot be read.
        """
        self._keeper.asked()
        with explained(self.store), self.side.attached() as reader:
            yield reader

    def columns(self, names: Sequence[str]) -> dict[str, list[float | None]]:
        """Metrics by name, an entry for each row of `metrics.jsonl`, `None` where it has none."""
        return self._metrics.read(names)

    def metric_names(self) -> list[str]:
        """All names, in the order they were met."""
        return self._metrics.names()


class Keeper:
    """Refreshes a side index while somebody asks for it."""

    def __init__(self, side: SideIndex) -> None:
        self._side, self._lock = side, threading.Lock()
        self._thread: threading.Thread | None = None
        self._until = self._patient_until = 0.0
        self._problem: UserError | None = None

    def asked(self) -> None:
        """Somebody asks: what is not there yet will come.

        Raises:
            UserError: the store cannot be read.
        """
        with self._lock:
            now = time.monotonic()
            self._until = now + KEPT_SECONDS
            if self._thread is None or not self._thread.is_alive():
                self._problem = None
                is_small = self._side.store_bytes() <= PATIENT_BYTES
                self._patient_until = now + PATIENCE if is_small else now
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()
        self._side.prepared.wait()
        self._side.filled.wait(max(self._patient_until - now, 0.0))
        if self._problem is not None:
            raise self._problem

    def _work(self) -> None:
        while time.monotonic() < self._until:
            try:
                self._side.refresh()
            except UserError as error:
                self._problem = error
                self._side.prepared.set()
                self._side.filled.set()
                return
            time.sleep(REFRESH_SECONDS)


class MetricColumns:
    """`metrics.jsonl` by columns; what was read once is not read again."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._columns: dict[str, list[float | None]] = {}
        self._rows, self._read, self._identity = 0, 0, (0, b"")

    def names(self) -> list[str]:
        """All names, in the order they were met."""
        with self._lock:
            self._refresh()
            return list(self._columns)

    def read(self, names: Sequence[str]) -> dict[str, list[float | None]]:
        """The columns of these names, of one length; one that there is not has no number."""
        with self._lock:
            self._refresh()
            return {name: self._padded(name) for name in names}

    def _padded(self, name: str) -> list[float | None]:
        column = self._columns.get(name, [])
        return column + [None] * (self._rows - len(column))

    def _refresh(self) -> None:
        """Read what was added; all of it anew where a resumed run took rows out."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            status = self._path.stat()
            begin = file.read(min(self._read, 256))
            if status.st_size < self._read or (status.st_ino, begin) != self._identity:
                self._clear()
            file.seek(self._read)
            part = file.read()
            *lines, _ = part.split(b"\n")
            for number, line in enumerate(lines, start=self._rows + 1):
                self._take(line, number)
            self._read += sum(len(line) + 1 for line in lines)
            file.seek(0)
            self._identity = status.st_ino, file.read(min(self._read, 256))

    def _take(self, line: bytes, number: int) -> None:
        try:
            row: Any = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise UserError(f"{self._path}, line {number}: is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{self._path}, line {number}: is no object")
        for name, value in row.items():
            column = self._columns.setdefault(name, [])
            column += [None] * (self._rows - len(column))
            column.append(value)
        self._rows += 1


__all__ = ["MetricColumns", "Run"]
