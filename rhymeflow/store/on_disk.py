"""The file that a store has open: whether it is still the one in the run directory.

SQLite goes on writing to a file that was deleted, and sees that one was cut short only when it
reads there. Knows nothing of what is in it.
"""

from __future__ import annotations

import os
from pathlib import Path

from rhymeflow.errors import StorageError, to_resume


class OnDisk:
    """The file at `path`, as it was when this was made."""

    def __init__(self, path: Path) -> None:
        self._path, self._run_dir = path, path.parent
        there = path.stat()
        self._identity, self._size = (there.st_dev, there.st_ino), there.st_size

    @property
    def is_missing(self) -> bool:
        """Whether the file was deleted and its directory was not."""
        return self._run_dir.is_dir() and not os.path.lexists(self._path)

    def check(self) -> None:
        """Raise `StorageError` if it was deleted, replaced or cut short. Costs microseconds."""
        try:
            there = self._path.stat()
        except FileNotFoundError:
            if self._run_dir.is_dir():
                raise StorageError(
                    f"{self._path}: was deleted while the run was writing to it; it is written "
                    f"again from what is open. To go on: {to_resume(self._run_dir)}"
                ) from None
            raise StorageError(
                f"{self._run_dir}: was deleted while the run was writing to it"
            ) from None
        if (there.st_dev, there.st_ino) != self._identity:
            raise StorageError(f"{self._path}: was replaced while the run was writing to it")
        if there.st_size < self._size:
            raise StorageError(
                f"{self._path}: was cut from {self._size:,} to {there.st_size:,} bytes while the "
                "run was writing to it; what is missing is lost. With a copy of it in its place, "
                f"{to_resume(self._run_dir)} goes on; checkpoints are in "
                f"{self._run_dir / 'checkpoints'}"
            )
        self._size = there.st_size
