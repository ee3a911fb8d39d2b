"""A side index of a run's store: a row for each response and each group, found by step or prompt.

The store is laid out for the run that writes it; what people ask of it ("the groups of step 40, by
spread of reward") would read it whole. The side index is a file of its own beside it, filled group
by group and kept up by what the store says has changed.

Holds true: the store is only read, and no read of it lasts longer than a part takes; each row says
what the store said at some moment since the last `refresh` began; a file of another layout, or of
another run, is made anew. Where the run directory cannot be written, the index is in a temporary
directory and lasts as long as the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from rhymeflow.dashboard import side_groups, side_log, side_spans
from rhymeflow.dashboard.side_log import transaction
from rhymeflow.store.damage import explained
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import EVENTS

FILE = "dashboard.db"
LAYOUT = 9
GROUPS_AT_ONCE = 2_000
SEGMENTS_AT_ONCE = 50_000

_CACHE_KIB = 64 * 1024
"""Of the index, in memory while it is written to: places in its tables are met again and again."""
_MARKS = "CREATE TABLE side.marks (name TEXT PRIMARY KEY, value NOT NULL);"
_TABLES = _MARKS + side_groups.TABLES + side_log.TABLES + side_spans.TABLES

_TOUCHED = {
    "segments": """INSERT OR IGNORE INTO temp.touched
        SELECT group_id FROM segments WHERE rowid > ? AND rowid <= ?""",
    "changes": """INSERT OR IGNORE INTO temp.touched
        SELECT a FROM changes WHERE seq > ? AND seq <= ?
        AND what IN ('groups', 'trajectories', 'pruned')""",
}
"""By the mark that moved, groups of which something has changed."""
_FIRSTS = """SELECT group_id FROM (
    SELECT group_id, ROW_NUMBER() OVER (ORDER BY group_id) - 1 AS place FROM temp.touched)
    WHERE place % ? = 0"""
_PART = "(SELECT group_id FROM temp.touched WHERE group_id >= {} AND group_id < {})"


class SideIndex:
    """The side index of one run."""

    def __init__(self, run_dir: Path) -> None:
        """Begin with what is there; `refresh` brings it up to date."""
        self._events = run_dir / EVENTS
        self._lock = threading.Lock()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if os.access(run_dir, os.W_OK):
            self.path = run_dir / FILE
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="rhymeflow-dashboard-")
            self.path = Path(self._folder.name) / FILE
        self.prepared = threading.Event()
        """It can be read, though it may not be full."""
        self.filled = threading.Event()
        self.share_done = 0.0
        """Of the groups and of the log, half each, until it has been complete once."""

    def store_bytes(self) -> int:
        """How large the store is; 0 if it is gone, which `refresh` says."""
        try:
            return self._events.stat().st_size
        except FileNotFoundError:
            return 0

    def refresh(self) -> None:
        """Bring it up to date; where another thread or process does so, wait for it.

        Raises:
            UserError: there is no store, or it is damaged.
        """
        if not self.prepared.is_set():
            self._look()
        with (
            self._lock,
            _alone(self.path.with_suffix(".lock")),
            explained(self._events),
            self.attached("rwc") as reader,
        ):
            if not self._is_right(reader):
                self._make(reader)
            self.prepared.set()
            marks = dict(reader.query("SELECT name, value FROM side.marks"))
            now = _marks(reader)
            if marks.get("filled") != 1:
                self._fill(reader, marks, now)
            else:
                self._follow(reader, marks, now)
            for share in side_log.follow(reader):
                self._is_done(0.5 + share / 2)
            self.share_done = 1.0
            self.filled.set()

    @contextlib.contextmanager
    def attached(self, mode: str = "ro") -> Iterator[TrajectoryReader]:
        """The store, with the index attached to it as the schema `side`."""
        reader = TrajectoryReader(self._events)
        try:
            reader.query("ATTACH ? AS side", f"file:{quote(str(self.path.resolve()))}?mode={mode}")
            if mode != "ro":
                reader.query("PRAGMA side.synchronous = OFF")  # it can be made again
                reader.query(f"PRAGMA side.cache_size = -{_CACHE_KIB}")
            yield reader
        finally:
            reader.close()

    def _look(self) -> None:
        """What is there can be read, also while another process fills it."""
        if self.path.exists():
            with explained(self._events), self.attached() as reader:
                if self._is_right(reader):
                    self.prepared.set()

    def _is_right(self, reader: TrajectoryReader) -> bool:
        """Whether the tables are there, of this run and of this layout."""
        if not reader.query("SELECT 1 FROM side.sqlite_master WHERE name = 'marks'"):
            return False
        marks = dict(reader.query("SELECT name, value FROM side.marks"))
        is_behind = marks.get("changes", 0) <= _marks(reader)["changes"]
        return is_behind and self._wanted(reader).items() <= marks.items()

    def _wanted(self, reader: TrajectoryReader) -> dict[str, object]:
        ((started,),) = reader.query("SELECT MIN(started) FROM attempts")
        has_words = side_groups.can_have_words()
        return {"layout": LAYOUT, "run": started or "", "words": int(has_words)}

    def _make(self, reader: TrajectoryReader) -> None:
        """Make the tables, in place of those that are there."""
        self._drop(reader)
        reader.query("PRAGMA side.journal_mode = WAL")
        with transaction(reader):
            for statement in _TABLES.split(";"):
                reader.query(statement)
            if side_groups.can_have_words():
                reader.query(side_groups.WORDS)
            for mark in self._wanted(reader).items():
                reader.query("INSERT INTO side.marks VALUES (?, ?)", *mark)

    def _drop(self, reader: TrajectoryReader) -> None:
        """Take out all tables; a virtual one takes those that it is made of with it."""
        tables = "FROM side.sqlite_master WHERE type = 'table'"
        for (name,) in reader.query(f"SELECT name {tables} ORDER BY sql NOT LIKE '%VIRTUAL%'"):
            reader.query(f"DROP TABLE IF EXISTS side.{name}")

    def _fill(self, reader: TrajectoryReader, marks: dict[str, int], now: dict[str, int]) -> None:
        """Go through all groups once, from where this was ended."""
        ((last,),) = reader.query("SELECT COALESCE(MAX(group_id), -1) FROM main.groups")
        if "changes" not in marks:  # what changes from here on is looked at again
            self._mark(reader, now)
        for start in range(marks.get("next_group", 0), last + 1, GROUPS_AT_ONCE):
            self._is_done(start / (last + 1) / 2)
            with transaction(reader):
                self._put(reader, f"BETWEEN {start} AND {start + GROUPS_AT_ONCE - 1}")
                self._mark(reader, {"next_group": start + GROUPS_AT_ONCE})
        self._mark(reader, {"filled": 1})

    def _follow(self, reader: TrajectoryReader, marks: dict[str, int], now: dict[str, int]) -> None:
        """Look again at groups of which something has changed; it may have gone on for long."""
        if all(marks[name] == value for name, value in now.items()):
            return
        reader.query("CREATE TEMP TABLE touched (group_id INTEGER PRIMARY KEY)")
        for name, statement in _TOUCHED.items():
            for start in range(marks[name], now[name], SEGMENTS_AT_ONCE):
                reader.query(statement, start, min(start + SEGMENTS_AT_ONCE, now[name]))
        firsts = [first for (first,) in reader.query(_FIRSTS, GROUPS_AT_ONCE)]
        for first, beyond in itertools.pairwise([*firsts, sys.maxsize]):
            with transaction(reader):
                self._put(reader, f"IN {_PART.format(first, beyond)}")
        self._mark(reader, now)

    def _put(self, reader: TrajectoryReader, those: str) -> None:
        side_groups.put(reader, those)

    def _is_done(self, share: float) -> None:
        if not self.filled.is_set():
            self.share_done = share

    def _mark(self, reader: TrajectoryReader, marks: dict[str, int]) -> None:
        for mark in marks.items():
            reader.query("INSERT OR REPLACE INTO side.marks VALUES (?, ?)", *mark)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other process of this machine fills the index: two of them would put rows twice."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _marks(reader: TrajectoryReader) -> dict[str, int]:
    """How far the store's tables go."""
    ((segments,),) = reader.query("SELECT COALESCE(MAX(rowid), 0) FROM segments")
    changes = 0
    if reader.query("SELECT 1 FROM main.sqlite_master WHERE name = 'changes'"):
        ((changes,),) = reader.query("SELECT COALESCE(MAX(seq), 0) FROM changes")
    return {"segments": segments, "changes": changes}


__all__ = ["FILE", "SideIndex"]
