"""Opens a previous run by its directory: its store, and the configuration it ran with.

Importing the configuration is slow, so only functions that read one import it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rhymeflow.errors import UserError, within
from rhymeflow.store.reader import Attempt, TrajectoryReader
from rhymeflow.store.schema import EVENTS

if TYPE_CHECKING:
    from rhymeflow.config import Config


class PreviousRun(NamedTuple):
    """A run, which may be in progress."""

    config: Config
    reader: TrajectoryReader


def open_run(run_dir: str, field: str) -> PreviousRun:
    """Open the run in `run_dir`, the value of the configuration's `field`. Raises `UserError` if
    there is no run, or another version of Rhymeflow wrote it."""
    from rhymeflow.config.load import read_config

    path = Path(run_dir)
    with within(field):
        store, config_file = store_of(path), path / "config.yaml"
        if not config_file.is_file():
            raise UserError(f"{path}: is not a run directory, it has no {config_file.name}")
        return PreviousRun(read_config(str(config_file)), TrajectoryReader(store))


def check(run_dir: str | None, field: str) -> None:
    """Raise `UserError` if `run_dir` is given and `open_run` cannot open it."""
    if run_dir is not None:
        open_run(run_dir, field).reader.close()


def store_of(run_dir: Path) -> Path:
    """Return the path of the store of the run in `run_dir`. Raises `UserError` if there is none."""
    path = run_dir / EVENTS
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such directory")
    if not path.is_file():
        raise UserError(f"{run_dir}: is not a run directory, it has no {path.name}")
    return path


def config_in_force(reader: TrajectoryReader) -> Config:
    """Return the last attempt's configuration. Raises `UserError`; see `config_of`."""
    return config_of(last_attempt(reader), reader.path)


def last_attempt(reader: TrajectoryReader) -> Attempt:
    """Return the last attempt. Raises `UserError` if there is none yet."""
    attempts = reader.attempts()
    if not attempts:
        raise UserError(f"{reader.path}: the run has not begun")
    return attempts[-1]


def section_in_force(reader: TrajectoryReader, name: str) -> Any:
    """Return one section of the configuration of the run's last attempt. Fields that this version
    does not have are ignored. Raises `UserError` if there is no attempt yet, or a value is not
    allowed in this version."""
    from pydantic import ValidationError

    from rhymeflow.config import Config

    attempt = last_attempt(reader)
    section: Any = Config.model_fields[name].annotation
    values = json.dumps(json.loads(attempt.config).get(name, {}))
    try:
        return section.model_validate_json(values, strict=True, extra="ignore")
    except ValidationError as error:
        details = error.errors()[0]
        where = ".".join([name, *map(str, details["loc"])])
        raise UserError(
            f"{reader.path}: the configuration of attempt {attempt.number}, {where}: "
            f"{details['msg']}"
        ) from None


def config_of(attempt: Attempt, path: Path) -> Config:
    """Return the configuration of an attempt in the log at `path`. Raises `UserError` if this
    version of Rhymeflow cannot read it."""
    from rhymeflow.config.load import config_from_json

    where = f"{path}: the configuration of attempt {attempt.number}"
    return config_from_json(attempt.config, where=where)
