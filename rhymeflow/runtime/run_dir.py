"""The run directory: where it is. docs/run-directory.md says what is in it.

A directory is used by one run.
"""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path

from rhymeflow.config import Config
from rhymeflow.config.load import dump_config
from rhymeflow.config.run import RUNS
from rhymeflow.store.schema import EVENTS, refuse_another
from rhymeflow.utils.disk import check_writable


def write_config(config: Config, path: Path) -> None:
    """Write `config.yaml`, in place of one that is there."""
    (path / "config.yaml").write_text(dump_config(config))


def located(config: Config, run_dir: Path) -> Config:
    """The configuration of a run that may have been moved to `run_dir`."""
    run = config.run.model_copy(update={"output_dir": str(run_dir)})
    return config.model_copy(update={"run": run})


def configured(config: Config) -> Path | None:
    """The directory that the configuration names."""
    return None if config.run.output_dir is None else Path(config.run.output_dir)


def choose_run_dir(config: Config) -> Path:
    """Return the configured directory, or one under `runs/` that is not there yet."""
    if (path := configured(config)) is not None:
        return path
    stem = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = (RUNS / (stem if n == 0 else f"{stem}-{n}") for n in count())
    return next(path for path in candidates if not path.exists())


def check_run_dir(path: Path) -> None:
    """Look whether a run could begin there; leaves nothing. Raises `UserError` as it does."""
    refuse_another(path / EVENTS)
    check_writable(path, "run.output_dir")
