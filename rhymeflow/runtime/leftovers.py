"""Takes away what a run leaves that a mistake of the user's ended before anything was trained.

Holds true: only what the run itself wrote is removed, while nobody else can begin one there; a run
of which a step was trained on keeps everything, and so does one whose log cannot be read, or that a
worker's death ended, whose logs say why.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import closing
from pathlib import Path

from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from rhymeflow.store import backup, schema
from rhymeflow.store.checkpoint_dirs import CHECKPOINTS, checkpoints_up_to
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import EVENTS

_OWN = {
    *("config.yaml", "inputs", "logs", "tensorboard", "wandb"),
    *(metrics.FILE, metrics.EXTRA, metrics.RUNS, "summary.json", backup.STATE),
    *(schema.LOCK, CHECKPOINTS),
}
"""What a run writes into its directory, beside its log."""

_TRAINED = "SELECT 1 FROM events WHERE kind = 'VersionPublished' LIMIT 1"


def was_trained(path: Path) -> bool:
    """Whether a step was trained on, by the log and the checkpoints; True if it cannot be known."""
    if checkpoints_up_to(path / CHECKPOINTS, sys.maxsize):
        return True
    try:
        with closing(TrajectoryReader(path / EVENTS)) as reader:
            return bool(reader.query(_TRAINED))
    except UserError:
        return True


def remove(path: Path, before: set[Path]) -> None:
    """Remove what the run in `path` wrote and was not there before.

    Raises:
        UserError: somebody else writes there meanwhile; nothing is removed then.
    """
    lock = schema.lock_directory(path)
    try:
        for each in list(path.iterdir()):
            if each.name in _OWN or each.name.startswith(EVENTS):
                _remove(each, before)
    finally:
        os.close(lock)


def _remove(path: Path, before: set[Path]) -> None:
    if path not in before:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif path.is_dir():
        for each in list(path.iterdir()):
            _remove(each, before)


__all__ = ["remove", "was_trained"]
