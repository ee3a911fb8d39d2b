"""The store of a fake run, whose process dies with it and whose disk gets full.

A death leaves what a killed process leaves: files as they are at that moment, of a transaction that
was not committed nothing. With a machine goes down what is not on the disk
(`benchmarks/faults/wal.py`)."""

import os
import shutil
import sqlite3
from pathlib import Path

from benchmarks.faults import wal
from rhymeflow.observe.metrics import FILE as METRICS
from rhymeflow.store.schema import EVENTS
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.fake_run.world import Killed, World

DEATH_SHARE, FULL_SHARE = 0.4, 0.8
"""How often a step of the controller is its last, and a commit meets a full disk, against how often
a worker's turn meets a fault: they cost most."""
CUT_SHARE = 0.3  # of deaths of the controller, those that take the end of the log with them
WAL_BYTES = (1, 4_000, 20_000, 100_000, 400_000)  # that are cut, at most
MOST_PAGES = 3  # that a disk has left when it is about to be full


class MortalStore(SqliteTrajectoryStore):
    """A store in `run_dir`; `heir` is the run directory that is left when its process dies."""

    def __init__(
        self, run_dir: Path, heir: Path, world: World, *, respects_flushes: bool = False
    ) -> None:
        """`respects_flushes`: a machine that goes down keeps what was to survive that. Else it
        loses more than one may, which a run that deletes nothing survives, too."""
        super().__init__(run_dir / EVENTS)
        self._respects_flushes = respects_flushes
        self._durable: wal.Extent | None = None
        self.heir, self._world, self._is_dead = heir, world, False
        self.committed = self._last_seq  # the last event that readers see

    def commit(self, *, durable: bool = False) -> None:
        """As every store's; the disk may be full, or the process may die before or after it."""
        if self._is_dead:
            return
        self.killing()
        if self._world.strikes(FULL_SHARE):
            self._fill()
        super().commit(durable=durable)
        if durable and self._respects_flushes:
            self._durable = wal.flushed(self.path)
        self.committed = self._last_seq
        self.killing("log flushed")

    def killing(self, how: str = "unflushed lost") -> None:
        """Die, if it is time to."""
        if self._is_dead or not self._world.strikes(DEATH_SHARE):
            return
        run_dir = self.path.parent
        self.heir.mkdir()
        for suffix in ("", "-wal", "-shm"):
            path = run_dir / f"{EVENTS}{suffix}"
            if path.exists():
                shutil.copyfile(path, self.heir / path.name)
        for name in ("config.yaml", METRICS):
            if (run_dir / name).exists():
                shutil.copyfile(run_dir / name, self.heir / name)
        if self._world.chance(CUT_SHARE):
            num_bytes = self._world.rng.choice(WAL_BYTES)
            if wal.cut(self.heir / EVENTS, num_bytes, self._durable):
                how, self.committed = "log cut", 0
        self._world.count(f"controller killed, {how}")
        self._is_dead = True
        raise Killed

    def close(self) -> None:
        """Close, or after a death only give back what this process holds."""
        if not self._is_dead:
            super().close()
        elif self._transaction._is_open:
            self._transaction._is_open = False
            self._connection.close()
            os.close(self._transaction._lock)

    def _fill(self) -> None:
        (pages,) = self._connection.execute("PRAGMA page_count").fetchone()
        most = pages + self._world.rng.randint(0, MOST_PAGES)
        self._connection.execute(f"PRAGMA max_page_count = {most}")


def damaged(run_dir: Path, copy: Path, world: World) -> Path:
    """A copy of the run's log of which a part is cut off, or overwritten."""
    copy.mkdir()
    for path in run_dir.glob(f"{EVENTS}*"):
        shutil.copyfile(path, copy / path.name)
    connection = sqlite3.connect(copy / EVENTS)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    ((size,),) = connection.execute("PRAGMA page_size")
    ((pages,),) = connection.execute("PRAGMA page_count")
    roots = [root for (root,) in connection.execute("SELECT rootpage FROM sqlite_master")]
    connection.close()
    if world.chance(0.5):
        os.truncate(copy / EVENTS, size * world.rng.randrange(1, pages))
    else:
        with (copy / EVENTS).open("r+b") as file:
            file.seek((world.rng.choice([root for root in roots if root]) - 1) * size)
            file.write(b"\xff" * size)
    return copy
