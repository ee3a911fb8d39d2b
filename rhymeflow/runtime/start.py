"""Prepares the start of a run: claims its directory, loads its runtime, checks its inputs.

One run uses a directory (docs/run-directory.md). Of runs that begin at the same moment, one gets
it: by creating it or, if it was named, by the lock and the store in it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from rhymeflow.config import Config
from rhymeflow.config.load import dump_config
from rhymeflow.config.run import RUNS
from rhymeflow.errors import StorageError, UserError
from rhymeflow.observe import metrics
from rhymeflow.store import backup, schema
from rhymeflow.store.checkpoint_dirs import CHECKPOINTS, CheckpointPlace, check_free, where_of
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import EVENTS, LOCK
from rhymeflow.store.writer import SqliteTrajectoryStore
from rhymeflow.utils.disk import check_writable, make_directory, one_line, remove_if_empty

if TYPE_CHECKING:
    from rhymeflow.runtime.base import Runtime

_OWN = {
    *("config.yaml", "inputs", "logs", "tensorboard", "wandb", "swanlab"),
    *(metrics.FILE, metrics.EXTRA, metrics.RUNS, "summary.json", backup.STATE),
    *(LOCK, CHECKPOINTS),
}
"""Files and directories that a run writes, beside its log."""


def write_config(config: Config, path: Path) -> None:
    """Write `config.yaml`, over an existing one."""
    (path / "config.yaml").write_text(dump_config(config))


def choose_run_dir(config: Config) -> Path:
    """Return the configured directory, or one under `runs/` that does not exist yet."""
    if config.run.output_dir is not None:
        return Path(config.run.output_dir)
    stem = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = (RUNS / (stem if n == 0 else f"{stem}-{n}") for n in count())
    return next(path for path in candidates if not path.exists())


def check_run_dir(path: Path) -> None:
    """Raise `UserError` if a run could not begin in the directory; leaves nothing behind."""
    schema.refuse_another(path / EVENTS)
    check_writable(path, "run.output_dir")


def check_start(config: Config) -> None:
    """Check that what the configuration names exists, before anything is loaded. Raises `UserError`
    if something is missing, or another run has its checkpoints or backup there."""
    from rhymeflow import check

    check.before_start(config)
    if config.runtime == "ray":
        from rhymeflow.runtime.ray.library import check_version

        check_version()
    metrics.check_installed(config.run.report_to)
    backup.check_free(config.run.backup)
    check_free(config.run.checkpoint_dir)


def check_nodes(config: Config) -> None:
    """Raise `UserError` if workers run on a cluster's nodes, and one of these cannot run them."""
    from rhymeflow import check

    if check.is_elsewhere(config):
        from rhymeflow.runtime.ray.library import num_gpus_of_nodes

        num_gpus_of_nodes(config)


def runtime_of(config: Config) -> Callable[[Config, Path, Path], AbstractContextManager[Runtime]]:
    """Return the runtime's class. It is called with configuration, run directory and log directory.
    Raises `UserError` if a package that it needs is not installed."""
    if config.runtime == "ray":
        from rhymeflow.runtime.ray.library import load

        load(config.ray.address)  # raises `UserError`
        from rhymeflow.runtime.ray.runtime import RayRuntime

        return RayRuntime
    from rhymeflow.runtime.local import LocalRuntime

    return LocalRuntime


@contextmanager
def claimed(
    config: Config, path: Path | None = None
) -> Iterator[tuple[Path, SqliteTrajectoryStore]]:
    """Claim the directory of a new run, by default the configured one; yield it and its store. If a
    `UserError` ends the run before a step is trained on, the run's files are removed, but for a log
    that it names. Raises `UserError` if the directory holds a run, another run begins there, or it
    cannot be created."""
    created: list[Path] = []
    before: set[Path] | None = None
    try:
        path, store = _begin(config, path, created)
        with one_line(path), closing(store):
            before = {f for f in path.rglob("*") if not f.name.startswith((EVENTS, LOCK))}
            yield path, store
    except UserError as error:
        if path is not None and before is not None and not _was_trained(path):
            named = {f for f in path.rglob("*") if str(f.absolute()) in str(error)}
            with suppress(UserError):
                _remove(path, before | named)
        remove_if_empty(created)
        raise


def _begin(
    config: Config, path: Path | None, created: list[Path]
) -> tuple[Path, SqliteTrajectoryStore]:
    """Create the directory and its store; append created directories to `created`."""
    try:
        if path is not None or config.run.output_dir is not None:
            path = path or choose_run_dir(config)
            created += make_directory(path, exist_ok=True)
        while path is None:  # another run may create the chosen directory first
            chosen = choose_run_dir(config)
            with suppress(FileExistsError):
                created += make_directory(chosen, exist_ok=False)
                path = chosen
        return path, SqliteTrajectoryStore(path / EVENTS, is_new=True)
    except OSError as error:
        raise UserError(f"run.output_dir: {path or RUNS} cannot be written: {error}") from error


def _was_trained(path: Path) -> bool:
    """Whether the log or the checkpoints show a trained step; True if that cannot be known."""
    try:
        if CheckpointPlace(where_of(path)).up_to():
            return True
        with closing(TrajectoryReader(path / EVENTS)) as reader:
            return bool(reader.query(schema.PUBLISHED))
    except (UserError, StorageError):
        return True


def _remove(path: Path, before: set[Path]) -> None:
    """Remove the files of the run in `path`, except those that existed `before`. Raises `UserError`
    if another process writes there; nothing is removed then."""
    lock = schema.lock_directory(path)
    try:
        for entry in sorted(path.rglob("*"), reverse=True):  # a directory after its contents
            top = entry.relative_to(path).parts[0]
            if entry not in before and (top in _OWN or top.startswith(EVENTS)):
                entry.rmdir() if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    finally:
        os.close(lock)
