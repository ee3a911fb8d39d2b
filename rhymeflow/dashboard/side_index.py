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
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from rhymeflow.dashboard import side_log
from rhymeflow.dashboard.side_log import transaction
from rhymeflow.observe.summary import EVENTS
from rhymeflow.store.damage import explained
from rhymeflow.store.reader import TrajectoryReader

FILE = "dashboard.db"
LAYOUT = 5
GROUPS_AT_ONCE = 2_000

_TABLES = f"""
CREATE TABLE side.marks (name TEXT PRIMARY KEY, value NOT NULL);
CREATE TABLE side.responses (
    group_id INTEGER, member INTEGER, length INTEGER, observed INTEGER, first_version INTEGER,
    last_version INTEGER, steps INTEGER, drafted INTEGER, reason TEXT, reward REAL, step INTEGER,
    PRIMARY KEY (group_id, member)) WITHOUT ROWID;
CREATE TABLE side.groups (
    group_id INTEGER PRIMARY KEY, row INTEGER, epoch INTEGER, prompt TEXT, ending TEXT,
    ending_version INTEGER, ending_reason TEXT, step INTEGER, responses INTEGER, rewarded INTEGER,
    cut INTEGER, reward_mean REAL, reward_min REAL, reward_max REAL, length_mean REAL,
    length_max INTEGER, staleness_max INTEGER, sampled INTEGER, steps INTEGER, drafted INTEGER);
CREATE INDEX side.groups_by_step ON groups (step, group_id);
CREATE INDEX side.groups_by_row ON groups (row, epoch);
{side_log.TABLES}"""

_SHOWN_PROMPT = 2_000
"""Characters of a prompt that are kept for searching."""

# `step` counts from 1, as people and metrics do; `trained` of the store from 0.
_RESPONSES = """
INSERT INTO side.responses
SELECT p.group_id, p.member, SUM(p.length), SUM(p.length * (p.steps = 0)), MIN(p.version),
    MAX(p.version), SUM(p.steps), SUM(p.drafted), t.reason, t.reward, t.trained + 1
FROM (SELECT group_id, member, LENGTH(tokens) / 4 AS length, version, steps, drafted FROM segments
        WHERE group_id {those}
    UNION ALL SELECT group_id, member, length, version, steps, drafted FROM pruned
        WHERE group_id {those}) p
LEFT JOIN trajectories t ON t.group_id = p.group_id AND t.member = p.member
GROUP BY p.group_id, p.member"""
_GROUPS = f"""
INSERT INTO side.groups
SELECT g.group_id, g.row, g.epoch, SUBSTR(g.prompt, 1, {_SHOWN_PROMPT}), g.ending, g.ending_version,
    g.ending_reason, CASE WHEN g.ending = 'consumed' THEN g.ending_version + 1 END,
    COUNT(r.member), COUNT(r.reward), TOTAL(r.reason IN ('length', 'finished_early')),
    AVG(r.reward), MIN(r.reward), MAX(r.reward), AVG(r.length), MAX(r.length),
    MAX(r.step - 1 - r.first_version), SUM(r.length - r.observed), SUM(r.steps), SUM(r.drafted)
FROM main.groups g LEFT JOIN side.responses r USING (group_id)
WHERE g.group_id {{those}} GROUP BY g.group_id"""

_TOUCHED = {
    "segments": """INSERT OR IGNORE INTO temp.touched
        SELECT group_id FROM segments WHERE rowid > ? AND rowid <= ?""",
    "changes": """INSERT OR IGNORE INTO temp.touched
        SELECT a FROM changes WHERE seq > ? AND seq <= ?
        AND what IN ('groups', 'trajectories', 'pruned')""",
}
"""By the mark that moved, groups of which something has changed."""


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
        """Of the groups, while it is filled for the first time; 1: it is complete."""

    def refresh(self) -> None:
        """Bring it up to date; where another thread or process does so, wait for it.

        Raises:
            UserError: there is no store, or it is damaged.
        """
        with (
            self._lock,
            _alone(self.path.with_suffix(".lock")),
            explained(self._events),
            self.attached("rwc") as reader,
        ):
            self._prepare(reader)
            self.prepared.set()
            marks = dict(reader.query("SELECT name, value FROM side.marks"))
            now = _marks(reader)
            if marks.get("filled") != 1:
                self._fill(reader, marks, now)
            else:
                self._follow(reader, marks, now)
            side_log.follow(reader)
            self.share_done = 1.0
            self.filled.set()

    @contextlib.contextmanager
    def attached(self, mode: str = "ro") -> Iterator[TrajectoryReader]:
        """The store, with the index attached to it as the schema `side`."""
        reader = TrajectoryReader(self._events)
        try:
            reader.query("ATTACH ? AS side", f"file:{quote(str(self.path.resolve()))}?mode={mode}")
            yield reader
        finally:
            reader.close()

    def _prepare(self, reader: TrajectoryReader) -> None:
        """Make the tables, anew if they are another run's or have another layout."""
        ((started,),) = reader.query("SELECT MIN(started) FROM attempts")
        wanted = {"layout": LAYOUT, "run": started or ""}
        if reader.query("SELECT 1 FROM side.sqlite_master WHERE name = 'marks'"):
            marks = dict(reader.query("SELECT name, value FROM side.marks"))
            behind = marks.get("changes", 0) <= _marks(reader)["changes"]
            if {name: marks.get(name) for name in wanted} == wanted and behind:
                return
            for kind, name in reader.query(
                "SELECT type, name FROM side.sqlite_master WHERE type = 'table'"
            ):
                reader.query(f"DROP {kind} side.{name}")
        reader.query("PRAGMA side.journal_mode = WAL")
        reader.query("PRAGMA side.synchronous = OFF")  # it can be made again
        with transaction(reader):
            for statement in _TABLES.split(";"):
                reader.query(statement)
            for mark in wanted.items():
                reader.query("INSERT INTO side.marks VALUES (?, ?)", *mark)

    def _fill(self, reader: TrajectoryReader, marks: dict[str, int], now: dict[str, int]) -> None:
        """Go through all groups once, from where this was ended."""
        ((last,),) = reader.query("SELECT COALESCE(MAX(group_id), -1) FROM main.groups")
        if "changes" not in marks:  # what changes from here on is looked at again
            self._mark(reader, now)
        for start in range(marks.get("next_group", 0), last + 1, GROUPS_AT_ONCE):
            self.share_done = start / (last + 1)
            with transaction(reader):
                self._put(reader, f"BETWEEN {start} AND {start + GROUPS_AT_ONCE - 1}")
                self._mark(reader, {"next_group": start + GROUPS_AT_ONCE})
        self._mark(reader, {"filled": 1})

    def _follow(self, reader: TrajectoryReader, marks: dict[str, int], now: dict[str, int]) -> None:
        """Look again at groups of which something has changed."""
        if all(marks[name] == value for name, value in now.items()):
            return
        reader.query("CREATE TEMP TABLE touched (group_id INTEGER PRIMARY KEY)")
        for name, statement in _TOUCHED.items():
            if marks[name] != now[name]:  # only the newest schemas have the table of changes
                reader.query(statement, marks[name], now[name])
        with transaction(reader):
            self._put(reader, "IN (SELECT group_id FROM temp.touched)")
            self._mark(reader, now)

    def _put(self, reader: TrajectoryReader, those: str) -> None:
        for table in ("responses", "groups"):
            reader.query(f"DELETE FROM side.{table} WHERE group_id {those}")
        reader.query(_RESPONSES.format(those=those))
        reader.query(_GROUPS.format(those=those))

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
