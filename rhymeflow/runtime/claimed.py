"""A directory for a new run, and its store: they are this run's alone, and taken away again.

They are claimed by making the directory, or where it is named, by the lock and the store in it: of
runs that begin at the same moment one has it. Of a run that a mistake of the user's ended before
anything was trained on, only what it wrote itself is removed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from rhymeflow.config import Config
from rhymeflow.config.run import RUNS
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from rhymeflow.runtime.start import choose_run_dir, configured_dir
from rhymeflow.store import backup, schema
from rhymeflow.store.checkpoint_dirs import CHECKPOINTS, checkpoints_up_to
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import EVENTS, LOCK
from rhymeflow.store.writer import SqliteTrajectoryStore
from rhymeflow.utils.disk import make, one_line, remove_if_empty

_OWN = {
    *("config.yaml", "inputs", "logs", "tensorboard", "wandb"),
    *(metrics.FILE, metrics.EXTRA, metrics.RUNS, "summary.json", backup.STATE),
    *(schema.LOCK, CHECKPOINTS),
}
"""What a run writes into its directory, beside its log."""


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
    path = path or configured_dir(config)
    try:
        path, store = _begin(config, path, made)
        with one_line(path), closing(store):
            before = {e for e in path.rglob("*") if not e.name.startswith((EVENTS, LOCK))}
            yield path, store
    except UserError:
        if path is not None and before is not None and not _was_trained(path):
            with suppress(UserError):
                _take_away(path, before)
        remove_if_empty(made)
        raise


def _begin(
    config: Config, path: Path | None, made: list[Path]
) -> tuple[Path, SqliteTrajectoryStore]:
    """The directory and the store, which is nobody else's; `made` gets what was not there."""
    try:
        if path is not None:
            made += make(path, exist_ok=True)
        while path is None:  # another run may begin in the one that was chosen
            chosen = choose_run_dir(config)
            with suppress(FileExistsError):
                made += make(chosen, exist_ok=False)
                path = chosen
        return path, SqliteTrajectoryStore(path / EVENTS, is_new=True)
    except OSError as error:
        raise UserError(f"run.output_dir: {path or RUNS} cannot be written: {error}") from error


def _was_trained(path: Path) -> bool:
    """Whether a step was trained on, by the log and the checkpoints; True if it cannot be known."""
    if checkpoints_up_to(path / CHECKPOINTS, sys.maxsize):
        return True
    try:
        with closing(TrajectoryReader(path / EVENTS)) as reader:
            return bool(reader.query(schema.PUBLISHED))
    except UserError:
        return True


def _take_away(path: Path, before: set[Path]) -> None:
    """Remove what the run in `path` wrote and was not there before.

    Raises:
        UserError: somebody else writes there meanwhile; nothing is removed then.
    """
    lock = schema.lock_directory(path)
    try:
        for each in sorted(path.rglob("*"), reverse=True):  # what is in a directory, before it
            top = each.relative_to(path).parts[0]
            if each not in before and (top in _OWN or top.startswith(EVENTS)):
                each.rmdir() if each.is_dir() and not each.is_symlink() else each.unlink()
    finally:
        os.close(lock)
