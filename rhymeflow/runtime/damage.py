"""Whether the log of a run is whole, as far as SQLite can tell, before the run is resumed.

Holds true: nothing is changed. Reads the whole file once; what rows say is looked at by the replay.
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from rhymeflow.errors import UserError
from rhymeflow.store.checkpoint_dirs import CHECKPOINTS, checkpoints_up_to
from rhymeflow.store.schema import EVENTS


def check_log(run_dir: Path) -> None:
    """Raise `UserError` if the log is damaged, with what is left of the run."""
    path = run_dir / EVENTS
    if not path.is_file():
        return  # what is said of that is said elsewhere
    uri = f"file:{quote(str(path.resolve()))}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        found = str(error)
    if found != "ok":
        found = " ".join(found.split())
        raise UserError(f"{path}: is damaged ({found}), cannot be resumed; {_left(run_dir)}")


def _left(run_dir: Path) -> str:
    checkpoints = checkpoints_up_to(run_dir / CHECKPOINTS, sys.maxsize)
    if not checkpoints:
        return "there is no checkpoint either"
    *_, newest = checkpoints.values()
    return f"a new run can begin with its last checkpoint: --model.name {newest}"
