"""What the log of a large run costs, with and without `run.keep_tokens` and a backup.

The store is given what a run of 128 GPUs gives it (200,000 tokens a second, in segments of 25, of
responses of 1,000), as quickly as it takes that; a version comes each 4 seconds, a checkpoint each
12. Reported for each second of that run: the time that its only writer takes (the controller's
process), `longest` the longest; how large `events.db` is, and how many MB of rows are `copied` to
the backup; and how long a resume takes to check the file.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks import harness
from rhymeflow.config import Config
from rhymeflow.core.events import Tick, TrajectoryRewarded, VersionPublished
from rhymeflow.core.types import TrajectoryId
from rhymeflow.store.backup import BackupThread
from rhymeflow.store.checkpoint_dirs import CHECKPOINTS
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.store import stores

IN_FLIGHT, SEGMENT, LENGTH, MEMBERS = 8_000, 25, 1_000, 16
VERSION_SECONDS, SAVE_SECONDS = 4, 12
PRUNE_LIMIT, BOUND_GROWTH = 0.5, 0.25
KINDS = ("all", "pruned", "backed up")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_number(parser, "--seconds", 60, "of the run that is stood for")
    parser.add_argument("--only", choices=KINDS, help="one of the kinds of log")


def run(args: argparse.Namespace) -> dict[str, Any]:
    rows = [measure(kind, args.seconds) for kind in ([args.only] if args.only else KINDS)]
    targets = []
    for row in rows:
        if row["log"] == "pruned":
            grown = row["MB"] / row["MB at half"] - 1
            targets.append(harness.at_most("retention/growth", grown, BOUND_GROWTH))
            targets.append(harness.at_most("retention/writer", row["writer"], PRUNE_LIMIT))
    return harness.report("retention", rows, targets, args, __doc__ or "")


def measure(kind: str, seconds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rhymeflow-retention-") as folder:
        path = Path(folder) / "run"
        path.mkdir()
        load = Load(path, prunes=kind == "pruned")
        backup = BackupThread(path, str(Path(folder) / "backup")) if kind == "backed up" else None
        if backup is not None:
            backup.start()
        half = longest = 0.0
        for second in range(seconds):
            before, saved = load.store.seconds, load.saved
            load.second(second)
            longest = max(longest, load.store.seconds - before)
            if backup is not None and load.saved != saved:
                (path / CHECKPOINTS / f"step-{load.saved}").mkdir(parents=True)
                backup.saved(load.saved)
            if second == seconds // 2:
                half = size(path)
        if backup is not None:
            backup.close()
        took = load.store.seconds
        load.store.close()
        began = time.perf_counter()
        with closing(sqlite3.connect(path / "events.db")) as db:
            db.execute("PRAGMA quick_check(1)").fetchone()
        return {
            "log": kind,
            "writer": round(took / seconds, 4),
            "MB at half": round(half, 1),
            "MB": round(size(path), 1),
            "check": round(time.perf_counter() - began, 2),
            "longest": round(longest, 3),
            "copied": round(size(Path(folder) / "backup", "*/rows/*.db"), 1),
        }


def size(path: Path, files: str = "events.db*") -> float:
    """MB of the store, its `-wal` included, or of other files."""
    return sum(os.stat(file).st_size for file in path.glob(files)) / 1e6


class Load:
    """What is stored of the run, second by second."""

    def __init__(self, path: Path, *, prunes: bool) -> None:
        self.store, self._prunes = SqliteTrajectoryStore(path / "events.db"), prunes
        self.store.begin_attempt(Config().model_dump_json(), now=0.0, started="")
        self.store.commit()
        self._lengths = dict.fromkeys(range(IN_FLIGHT // MEMBERS), 0)
        for group in self._lengths:
            self._lengths[group] = group * SEGMENT % LENGTH
            self._put_group(group)
        self._num_groups, self._version, self.saved = len(self._lengths), 0, 0

    def second(self, second: int) -> None:
        store, events = self.store, []
        tokens = list(range(SEGMENT))
        for group, length in list(self._lengths.items()):
            for member in range(MEMBERS):
                stores.segment(
                    store, (group, member), tokens, start=length, version=self._version,
                    instance=f"rollout-{member}", steps=SEGMENT,
                )  # fmt: skip
            self._lengths[group] = length + SEGMENT
            if length + SEGMENT >= LENGTH:
                events += self._end(group)
        store.record(float(second), [*events, *[Tick()] * 50])
        if second % VERSION_SECONDS == 0:
            self._version += 1
            store.record(float(second), [VersionPublished(self._version, "0" * 16)])
            store.commit(durable=True)
        if second % SAVE_SECONDS == 0:
            self.saved = self._version
        if self._prunes and self.saved:
            store.prune(before=self.saved, history_tokens=0)
        store.commit()

    def _end(self, group: int) -> list[TrajectoryRewarded]:
        del self._lengths[group]
        found = []
        for member in range(MEMBERS):
            text = "word " * (LENGTH * 4 // 5)
            stores.finished(self.store, (group, member), LENGTH, 0.5, text=text, f=0.5)
            found.append(TrajectoryRewarded(TrajectoryId(group, member), 0.5))
        self.store.put_consumed(group, version=self._version, members=list(range(MEMBERS)))
        self._lengths[self._num_groups] = 0
        self._put_group(self._num_groups)
        self._num_groups += 1
        return found

    def _put_group(self, group: int) -> None:
        stores.group(self.store, group, prompt="p" * 400, prompt_tokens=[1] * 100)
