"""What happens before a run starts: its directory is claimed, its runtime loaded, its inputs found.

A directory is used by one run (docs/run-directory.md). Of runs that begin at the same moment, one
gets it: by making it or, where it was named, by the lock and the store in it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from rhymeflow.config import Config
from rhymeflow.config.load import dump_config
from rhymeflow.config.run import RUNS
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from rhymeflow.store import backup, schema
from rhymeflow.store.checkpoint_dirs import CHECKPOINTS, checkpoints_up_to
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import EVENTS, LOCK
from rhymeflow.store.writer import SqliteTrajectoryStore
from rhymeflow.utils.disk import check_writable, make, one_line, remove_if_empty

if TYPE_CHECKING:
    from rhymeflow.runtime.base import Runtime

_OWN = {
    *("config.yaml", "inputs", "logs", "tensorboard", "wandb"),
    *(metrics.FILE, metrics.EXTRA, metrics.RUNS, "summary.json", backup.STATE),
    *(LOCK, CHECKPOINTS),
}
"""What a run writes into its directory, beside its log."""


def write_config(config: Config, path: Path) -> None:
    """Write `config.yaml`, in place of one that is there."""
    (path / "config.yaml").write_text(dump_config(config))


def choose_run_dir(config: Config) -> Path:
    """The configured directory, or one under `runs/` that does not exist yet."""
    if config.run.output_dir is not None:
        return Path(config.run.output_dir)
    stem = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = (RUNS / (stem if n == 0 else f"{stem}-{n}") for n in count())
    return next(path for path in candidates if not path.exists())


def check_run_dir(path: Path) -> None:
    """Check that a run could begin there; leaves nothing. Raises `UserError` as a run does."""
    schema.refuse_another(path / EVENTS)
    check_writable(path, "run.output_dir")


def check_start(config: Config) -> None:
    """Look for what the configuration names, before anything is loaded.

    Raises:
        UserError: something is not there, or another run has its backup there.
    """
    from rhymeflow import check

    check.before_start(config)
    if config.runtime == "ray":
        from rhymeflow.runtime.ray.library import check_version

        check_version()
    metrics.check_installed(config.run.report_to)
    backup.check_free(config.run.backup)


def runtime_of(config: Config) -> Callable[[Config, Path, Path], AbstractContextManager[Runtime]]:
    """The runtime: made of the configuration, the run directory and the directory for logs.

    Raises:
        UserError: what it needs is not installed.
    """
    if config.runtime == "ray":
        from rhymeflow.runtime.ray.library import load

        load(config.ray.address)  # says what is missing
        from rhymeflow.runtime.ray.runtime import RayRuntime

        return RayRuntime
    from rhymeflow.runtime.local import LocalRuntime

    return LocalRuntime


@contextmanager
def claimed(
    config: Config, path: Path | None = None
) -> Iterator[tuple[Path, SqliteTrajectoryStore]]:
    """The directory of a new run, by default the configured one, and its store, both this run's
    alone. If a `UserError` ends the run before anything is trained, what it wrote is removed.

    Raises:
        UserError: the directory holds a run, one is about to begin there, or it cannot be created.
    """
    made: list[Path] = []
    before: set[Path] | None = None
    try:
        path, store = _begin(config, path, made)
        with one_line(path), closing(store):
            before = {e for e in path.rglob("*") if not e.name.startswith((EVENTS, LOCK))}
            yield path, store
    except UserError:
        if path is not None and before is not None and not _was_trained(path):
            with suppress(UserError):
                _remove(path, before)
        remove_if_empty(made)
        raise


def _begin(
    config: Config, path: Path | None, made: list[Path]
) -> tuple[Path, SqliteTrajectoryStore]:
    """The directory and its store; `made` gets the directories that did not exist."""
    try:
        if path is not None or config.run.output_dir is not None:
            path = path or choose_run_dir(config)
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


def _remove(path: Path, before: set[Path]) -> None:
    """Remove what the run in `path` wrote, but for what was there `before`.

    Raises:
        UserError: another process writes there; nothing is removed then.
    """
    lock = schema.lock_directory(path)
    try:
        for each in sorted(path.rglob("*"), reverse=True):  # what is in a directory, before it
            top = each.relative_to(path).parts[0]
            if each not in before and (top in _OWN or top.startswith(EVENTS)):
                each.rmdir() if each.is_dir() and not each.is_symlink() else each.unlink()
    finally:
        os.close(lock)
