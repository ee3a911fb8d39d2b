"""How a worker reaches a run's store: as a file, or by asking the process that has the file.

Holds true: readers of both kinds answer alike. Knows nothing of what is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from rhymeflow.config import Config
from rhymeflow.core.types import GroupId
from rhymeflow.store.damage import explained
from rhymeflow.store.reader import Attempt, TrajectoryReader, TrajectoryRecord
from rhymeflow.store.remote import STORE, RemoteTrajectoryReader
from rhymeflow.store.schema import EVENTS


class Reader(Protocol):
    """What workers ask a store for; see `TrajectoryReader`."""

    path: Path

    def query(self, statement: str, *values: object) -> list[tuple]:
        """Rows of one SQL statement."""

    def batch(
        self, groups: Sequence[GroupId], members: Sequence[Sequence[int]]
    ) -> list[TrajectoryRecord]:
        """Records of these members of each group."""

    def attempts(self) -> list[Attempt]:
        """The attempts at this run, in order."""

    def close(self) -> None:
        """Ask no more."""


class StoreFile(NamedTuple):
    """A store on this machine."""

    path: Path

    def open(self) -> TrajectoryReader:
        """Open the file."""
        return TrajectoryReader(self.path)

    def explained(self) -> AbstractContextManager[None]:
        """Raise a `UserError` for an error in the block if the file is damaged."""
        return explained(self.path)


class StoreElsewhere(NamedTuple):
    """A store on another node, which the process called `owner` answers for."""

    owner: str
    path: Path

    def open(self) -> RemoteTrajectoryReader:
        """Be able to ask."""
        return RemoteTrajectoryReader(self.owner, self.path)

    def explained(self) -> AbstractContextManager[None]:
        """The same; who has the file looks at it."""
        return explained(self.path, lambda _, error: self.open().damage(error))


def store_in(config: Config, run_dir: Path) -> StoreFile | StoreElsewhere:
    """The store of the run in `run_dir`, a directory of the controller's machine."""
    path = run_dir / EVENTS
    return StoreElsewhere(STORE, path) if config.runtime == "ray" else StoreFile(path)


__all__ = ["Reader", "StoreElsewhere", "StoreFile", "store_in"]
