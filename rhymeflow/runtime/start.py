"""What is chosen and looked at before a run starts: its directory, its machines, what it names.

A directory is used by one run; docs/run-directory.md says what is in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from rhymeflow.config import Config
from rhymeflow.config.load import dump_config
from rhymeflow.config.run import RUNS
from rhymeflow.store.schema import EVENTS, refuse_another
from rhymeflow.utils.disk import check_writable

if TYPE_CHECKING:
    from rhymeflow.runtime.base import Runtime


def write_config(config: Config, path: Path) -> None:
    """Write `config.yaml`, in place of one that is there."""
    (path / "config.yaml").write_text(dump_config(config))


def configured_dir(config: Config) -> Path | None:
    """The directory that the configuration names."""
    return None if config.run.output_dir is None else Path(config.run.output_dir)


def choose_run_dir(config: Config) -> Path:
    """Return the configured directory, or one under `runs/` that is not there yet."""
    if (path := configured_dir(config)) is not None:
        return path
    stem = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = (RUNS / (stem if n == 0 else f"{stem}-{n}") for n in count())
    return next(path for path in candidates if not path.exists())


def check_run_dir(path: Path) -> None:
    """Look whether a run could begin there; leaves nothing. Raises `UserError` as it does."""
    refuse_another(path / EVENTS)
    check_writable(path, "run.output_dir")


def check_start(config: Config) -> None:
    """Look for what the configuration names, before anything is loaded; a dry run does the same.

    Raises:
        UserError: something is not there, or another run has its backup there.
    """
    from rhymeflow import check
    from rhymeflow.observe.metrics import check_installed
    from rhymeflow.store.backup import check_free

    check.before_start(config)
    if config.runtime == "ray":
        from rhymeflow.runtime.ray.library import check_version

        check_version()
    check_installed(config.run.report_to)
    check_free(config.run.backup)


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
