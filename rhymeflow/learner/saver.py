"""Writes checkpoints in a thread, so that the learner waits for no disk, only for a copy.

Holds true: checkpoints are written in the order in which they were begun, one at a time, each
complete or absent; older ones are deleted only after a newer one is complete. Knows nothing of when
one is due, or of which older ones are to stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

from safetensors import SafetensorError

from rhymeflow.core.types import Version
from rhymeflow.learner.checkpoint import remove_others


class Saved(NamedTuple):
    """A checkpoint lies in `path`, or could not be written because of `error`."""

    version: Version
    path: Path
    error: str | None


class Snapshot(Protocol):
    """All that a checkpoint holds; `checkpoint.Snapshot` is one."""

    def write(self, directory: Path) -> None:
        """Write it: `directory` is complete or not there."""


class Saver:
    """Writes `directory/step-N`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._pending: deque[Future[Saved]] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether there is a checkpoint whose end was not told yet."""
        return bool(self._pending)

    def begin(self, version: Version, snapshot: Snapshot, keep: Collection[Version]) -> None:
        """Write `snapshot`; then delete all checkpoints but it and those of versions `keep`."""
        self._pending.append(self._thread.submit(self._write, version, snapshot, keep))

    def ended(self) -> list[Saved]:
        """What became of checkpoints since this was last asked. Does not wait."""
        found = []
        while self._pending and self._pending[0].done():
            found.append(self._pending.popleft().result())
        return found

    def _write(self, version: Version, snapshot: Snapshot, keep: Collection[Version]) -> Saved:
        path = self._path(version)
        try:
            snapshot.write(path)
            remove_others(self._directory, {path, *map(self._path, keep)})
        except (OSError, RuntimeError, SafetensorError) as error:  # torch's, safetensors' own
            return Saved(version, path, str(error).splitlines()[0])
        return Saved(version, path, None)

    def _path(self, version: Version) -> Path:
        return self._directory / f"step-{version}"


class RankSaver(Saver):
    """Of a learner of many ranks: each writes its part, and rank 0 deletes the older ones.

    `ended` raises `RuntimeError` if another rank is gone: nothing is known of the checkpoint then.
    """

    def __init__(self, directory: Path, *, is_lead: bool) -> None:
        super().__init__(directory)
        self._is_lead = is_lead

    def _write(self, version: Version, snapshot: Snapshot, keep: Collection[Version]) -> Saved:
        path = self._path(version)
        try:
            snapshot.write(path)
            if self._is_lead:
                remove_others(self._directory, {path, *map(self._path, keep)})
        except OSError as error:
            return Saved(version, path, str(error).splitlines()[0])
        return Saved(version, path, None)


__all__ = ["RankSaver", "Saved", "Saver"]
