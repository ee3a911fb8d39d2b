"""A directory for a new run, and its store.

Holds true: they are of one run, whoever else begins at the same moment: the first to make the
directory, or where it is named, the lock and the store in it. Nobody else's are touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from rhymeflow.config import Config
from rhymeflow.config.run import RUNS
from rhymeflow.errors import UserError
from rhymeflow.runtime import leftovers
from rhymeflow.runtime.run_dir import choose_run_dir, configured
from rhymeflow.store.schema import EVENTS, LOCK
from rhymeflow.store.writer import SqliteTrajectoryStore
from rhymeflow.utils.directories import make, remove_if_empty
from rhymeflow.utils.faults import one_line


@contextmanager
def claimed(
    config: Config, path: Path | None = None
) -> Iterator[tuple[Path, SqliteTrajectoryStore]]:
    """The directory of a new run, by default the configured one, and its store: they are this
    run's alone. If a `UserError` ends it before anything is trained, what it wrote is taken away.

    Raises:
        UserError: the directory holds a run, one is about to begin there, or it cannot be created.
    """
    made: list[Path] = []
    before: set[Path] | None = None
    path = path or configured(config)
    try:
        path, store = _begin(config, path, made)
        with one_line(path), closing(store):
            before = {e for e in path.rglob("*") if not e.name.startswith((EVENTS, LOCK))}
            yield path, store
    except UserError:
        if path is not None and before is not None and not leftovers.was_trained(path):
            with suppress(UserError):
                leftovers.remove(path, before)
        remove_if_empty(made)
        raise


def _begin(
    config: Config, path: Path | None, made: list[Path]
) -> tuple[Path, SqliteTrajectoryStore]:
    """The directory and the store, which is nobody else's; `made` gets what was not there."""
    try:
        if path is None:
            path = _make(config, made)
        else:
            made += make(path, exist_ok=True)
        return path, SqliteTrajectoryStore(path / EVENTS, is_new=True)
    except OSError as error:
        raise UserError(f"run.output_dir: {path or RUNS} cannot be written: {error}") from error


def _make(config: Config, made: list[Path]) -> Path:
    """Make a directory that no other run has, also none that begins at the same moment."""
    while True:
        path = choose_run_dir(config)
        with suppress(FileExistsError):
            made += make(path, exist_ok=False)
            return path
