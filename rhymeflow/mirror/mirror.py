"""The mirror of a run that is going on: a thread that copies, and what is to be said of it.

Holds true: nobody waits for it but at the end of an attempt, and then not for long; while the
mirror cannot be reached it is tried again, and the run goes on. What is behind is in the store, not
in memory. Knows nothing of what is copied.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path

from rhymeflow.config import Config
from rhymeflow.errors import UserError, to_resume
from rhymeflow.mirror import lineage
from rhymeflow.mirror.remote import Remote, Unreachable
from rhymeflow.mirror.shipper import Shipper
from rhymeflow.store import mirrored

RETRY_SECONDS = (1.0, 60.0)
"""Between two tries, at first and at most."""

END_SECONDS = 60.0
"""That the end of an attempt waits for the rest to be copied."""

LATE_SECONDS = 60.0
"""So much later than `run.mirror_seconds` is said to be late."""


def check_free(config: Config) -> None:
    """Look whether a new run can have its mirror there. One that cannot be reached may come.

    Raises:
        UserError: there is no such kind of storage, or another run is in it.
    """
    if config.run.mirror is None:
        return
    remote = Remote(config.run.mirror)
    try:
        there = lineage.read_all(remote)
    except Unreachable:
        return
    if there:
        raise UserError(
            f"run.mirror: {config.run.mirror} holds a run already; "
            f"`{to_resume(config.run.mirror)} --output_dir DIR` goes on with it, or name another "
            "place"
        )


class Mirror:
    """The mirror of the run in `run_dir`, at `url`."""

    @staticmethod
    def of(config: Config, run_dir: Path) -> Mirror | None:
        """The one that is configured, if one is."""
        run = config.run
        return None if run.mirror is None else Mirror(run_dir, run.mirror, run.mirror_seconds)

    def __init__(self, run_dir: Path, url: str, seconds: float) -> None:
        """Raise `UserError` if there is no such kind of storage."""
        self._run_dir, self._seconds = run_dir, seconds
        self._remote = Remote(url)
        self._thread = threading.Thread(target=self._serve, name="mirror", daemon=True)
        self._stopping, self._ends_at = threading.Event(), float("inf")
        self._up_to_date_at = time.monotonic()
        self._problem: str | None = None
        self._said: str | None = None
        self._defect: BaseException | None = None

    def start(self) -> None:
        """Begin: the store is there."""
        self._up_to_date_at = time.monotonic()
        self._thread.start()

    @property
    def behind(self) -> float:
        """Seconds since all that there was could be resumed from."""
        return time.monotonic() - self._up_to_date_at

    def notice(self) -> str | None:
        """What the user should know now and was not told, in a line."""
        if self._defect is not None:
            defect, self._defect = self._defect, None
            raise defect
        state = self._problem
        if state is None and self.behind > self._seconds + LATE_SECONDS:
            state = "copying takes long"
        if (state is None) == (self._said is None):
            return None
        self._said = state
        if state is None:
            return f"mirror {self._remote.url}: is up to date again"
        return f"mirror {self._remote.url}: {state}; the run goes on, and it is tried again"

    def close(self) -> None:
        """Copy the rest, if that does not take long, and note how far it came."""
        if not self._thread.is_alive():
            return
        self._ends_at = time.monotonic() + END_SECONDS
        self._stopping.set()
        self._thread.join(END_SECONDS + 1.0)

    def _serve(self) -> None:
        try:
            self._keep_up_to_date()
        except BaseException as error:  # noqa: BLE001 - the controller's thread raises it
            self._defect = error

    def _keep_up_to_date(self) -> None:
        shipper = Shipper(self._run_dir, self._remote)
        wait = 0.0
        try:
            while True:
                is_last = self._stopping.wait(wait)
                began = time.monotonic()
                try:
                    is_complete = shipper.ship()
                except (Unreachable, OSError, sqlite3.DatabaseError) as error:
                    self._problem = " ".join(str(error).split())
                    first, most = RETRY_SECONDS
                    wait = min(max(2 * wait, first), most)
                    is_complete = False
                else:
                    self._problem, self._up_to_date_at = None, began
                    wait = self._seconds if is_complete else min(self._seconds, 1.0)
                if is_last and (is_complete or time.monotonic() > self._ends_at):
                    return
                if is_last:
                    time.sleep(min(wait, 0.1 if self._problem is None else 1.0))
        finally:
            self._note_problem(shipper)
            shipper.close()

    def _note_problem(self, shipper: Shipper) -> None:
        if self._problem is not None and self._run_dir.is_dir():
            shipper.state.problem = self._problem
            mirrored.write(self._run_dir, shipper.state)
