"""Defines the tables of `events.db` and their version, and opens the file.

One process at a time can open it for writing."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import sqlite3
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import quote

from rhymeflow.errors import UserError, to_resume
from rhymeflow.utils.source_version import source_version

ENVIRONMENT = "environment"  # stored as the instance of an environment's observations

EVENTS = "events.db"

SCHEMA_VERSION = 20
"""Version of the tables and of the fields of events and commands; others are refused."""

PUBLISHED = """SELECT json_extract(body, '$.version') FROM events
    WHERE kind = 'VersionPublished' ORDER BY seq DESC LIMIT 1"""
"""Selects the newest published version."""

GIVEN = "IIF(components != json_object(), reward, NULL)"
"""The reward of a row of `trajectories`; NULL until there is one, and of a run without rewards."""

LOCK = "writer.lock"
"""File that the controller locks and writes its name to. The lock ends with the process."""

# docs/run-directory.md describes each table and column, with queries. Comments stand here and not
# in the statements, whose text SQLite stores.
#
# attempts: Each start of the run; the events of an attempt are those from `first_event` on.
# events: The coordinator's inputs; `body` holds an event's fields as JSON.
# commands: The coordinator's outputs; `event` caused the command, and is a `Tick` in most cases.
# snapshots: The coordinator's state after an event; the last two are kept.
# groups: A prompt and how its group ended. Groups below 0 belong to a suite: they answer its
#     prompts for the evaluation of version `evaluates`.
# segments: Tokens that one instance generated under one version. Blobs are little-endian: int32
#     tokens, float32 log-probabilities. `steps` counts the iterations that generated them, 0 for an
#     environment's observation; `drafted` counts the tokens that were proposed in these iterations;
#     `accepted` is stored with `run.token_details`; `follows` is that of an agent's call
#     (`branches.py`).
# trajectories: A complete response. `trained` is the version of the batch that it was trained in.
# token_details: The learner's results for each token, with `run.token_details`.
# pruned: Segments whose tokens were deleted, without the tokens (`pruning.py`).
# changes: Keys of rows that were inserted, updated or deleted in tables that do not only grow, for
#     `backup.py`. `a` and `b` are the key; `b` is 0 where the key has one column.
# spans: All segments that instances generated, from `segments` and `pruned`.
# responses: Every response to a training prompt that has stored tokens. Members that a consumed
#     group did not need count as aborted.
# evaluations: Rewarded answers of completed evaluations. No other view has answers to suites.
_TABLES = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value);
CREATE TABLE attempts (attempt INTEGER PRIMARY KEY, first_event INTEGER NOT NULL,
    time REAL NOT NULL, started TEXT NOT NULL, config TEXT NOT NULL);
CREATE TABLE events (seq INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL,
    body TEXT NOT NULL);
CREATE TABLE commands (seq INTEGER PRIMARY KEY, event INTEGER NOT NULL, kind TEXT NOT NULL,
    body TEXT NOT NULL);
CREATE TABLE snapshots (event INTEGER PRIMARY KEY, state BLOB NOT NULL);
CREATE TABLE groups (group_id INTEGER PRIMARY KEY, row INTEGER NOT NULL, epoch INTEGER NOT NULL,
    prompt TEXT NOT NULL, prompt_tokens BLOB NOT NULL, columns TEXT NOT NULL,
    ending TEXT, ending_version INTEGER, ending_reason TEXT, suite TEXT, evaluates INTEGER);
CREATE INDEX groups_by_step ON groups (ending_version, ending);
CREATE INDEX groups_by_row ON groups (row);
CREATE TABLE segments (group_id INTEGER NOT NULL, member INTEGER NOT NULL, start INTEGER NOT NULL,
    version INTEGER NOT NULL, instance TEXT NOT NULL, steps INTEGER NOT NULL,
    drafted INTEGER NOT NULL, tokens BLOB NOT NULL, logprobs BLOB NOT NULL, accepted BLOB,
    follows INTEGER, PRIMARY KEY (group_id, member, start));
CREATE TABLE trajectories (group_id INTEGER NOT NULL, member INTEGER NOT NULL,
    length INTEGER NOT NULL, reason TEXT NOT NULL, text TEXT,
    reward REAL, components TEXT, trained INTEGER, PRIMARY KEY (group_id, member));
CREATE TABLE token_details (group_id INTEGER NOT NULL, member INTEGER NOT NULL, logprobs BLOB,
    flags BLOB NOT NULL, PRIMARY KEY (group_id, member));
CREATE TABLE pruned (group_id INTEGER NOT NULL, member INTEGER NOT NULL, start INTEGER NOT NULL,
    length INTEGER NOT NULL, version INTEGER NOT NULL, instance TEXT NOT NULL,
    steps INTEGER NOT NULL, drafted INTEGER NOT NULL, PRIMARY KEY (group_id, member, start));
CREATE TABLE changes (seq INTEGER PRIMARY KEY, what TEXT NOT NULL, a INTEGER NOT NULL,
    b INTEGER NOT NULL);
CREATE VIEW spans AS
    SELECT group_id, member, start, LENGTH(tokens) / 4 AS length, version, instance, steps, drafted
    FROM segments WHERE steps > 0 AND +group_id >= 0 UNION ALL
    SELECT group_id, member, start, length, version, instance, steps, drafted FROM pruned
    WHERE steps > 0;
CREATE VIEW responses AS
    SELECT group_id, member, s.length, s.first_version, t.reason,
        {GIVEN} AS reward, t.trained,
        CASE WHEN t.trained IS NOT NULL THEN 'consumed' WHEN g.ending = 'consumed' THEN 'aborted'
            ELSE g.ending END AS ending
    FROM (SELECT group_id, member, SUM(LENGTH(tokens)) / 4 AS length, MIN(version) AS first_version
            FROM segments GROUP BY group_id, member UNION ALL
        SELECT group_id, member, SUM(length), MIN(version) FROM pruned GROUP BY group_id, member) s
    JOIN groups g USING (group_id) LEFT JOIN trajectories t USING (group_id, member)
    WHERE g.suite IS NULL;
CREATE VIEW evaluations AS
    SELECT ending_version AS version, suite, row, member AS sample, group_id, length, text, reward
    FROM groups JOIN trajectories USING (group_id)
    WHERE ending = 'evaluated' AND reward IS NOT NULL;
CREATE VIEW trained AS
    SELECT group_id, member, trained AS version, first_version,
        trained - first_version AS staleness, length, reason, reward
    FROM responses WHERE trained IS NOT NULL;
CREATE VIEW routes AS
    SELECT c.seq, c.event, e.time, json_extract(c.body, '$.trajectory[0]') AS group_id,
        json_extract(c.body, '$.trajectory[1]') AS member,
        json_extract(c.body, '$.instance') AS instance,
        json_extract(c.body, '$.number') AS number, json_extract(c.body, '$.version') AS version
    FROM commands c JOIN events e ON e.seq = c.event WHERE c.kind = 'Route';
CREATE VIEW first_routes AS
    SELECT group_id, member, MIN(seq) AS seq, time, instance, version AS v_traj
    FROM routes GROUP BY group_id, member;
"""
CHANGES_KEYS: Mapping[str, tuple[str, ...]] = {
    "attempts": ("attempt",),
    "groups": ("group_id",),
    "trajectories": ("group_id", "member"),
    "token_details": ("group_id", "member"),
    "pruned": ("group_id",),
}
"""Tables whose changed rows `changes` lists; `a` and `b` there are the values of these columns."""


def open_for_writing(path: Path, *, is_new: bool) -> tuple[sqlite3.Connection, int]:
    """Open or create the store; return the connection and the descriptor that holds the lock.
    Raises `UserError` if the directory is missing, another process writes here, the file is no
    event store of this version, or it exists although `is_new`."""
    if is_new:
        refuse_another(path)
    with ExitStack() as undo:
        lock = lock_directory(path.parent)
        undo.callback(os.close, lock)
        if is_new:  # again: another process may have made one before the lock was taken
            refuse_another(path)
        try:
            connection = undo.enter_context(closing(sqlite3.connect(path, isolation_level=None)))
            if not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                create(connection)
            check_version(connection, path)
            connection.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.DatabaseError as error:
            raise UserError(f"{path}: cannot be opened as an event store: {error}") from error
        undo.pop_all()
    return connection, lock


def refuse_another(path: Path) -> None:
    """Raise `UserError` if the path of a new run's store exists already."""
    if path.exists():
        resume = f"`{to_resume(path.parent)}` resumes it, or"
        what = "a run in progress;" if is_written(path.parent) else f"a run already; {resume}"
        raise UserError(f"run.output_dir: {path.parent} holds {what} name another directory")


def lock_directory(directory: Path) -> int:
    """Take the writer's lock and write this process's name to it. Return the descriptor that holds
    the lock. Raises `UserError` if the directory is missing or another process has the lock."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory")
    if (directory / LOCK).is_dir():
        raise UserError(
            f"{directory / LOCK}: is a directory, should be the lock of the run's writer"
        )
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 1024).decode()
        os.close(descriptor)
        raise UserError(f"{directory}: {holder} is writing to this run") from error
    if not _is_same_file(descriptor, directory / LOCK):  # a run that failed has deleted it
        os.close(descriptor)
        return lock_directory(directory)
    os.truncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return descriptor


def is_written(run_dir: Path) -> bool:
    """Whether a process holds the writer's lock of the run in `run_dir`."""
    try:
        descriptor = os.open(run_dir / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return False
    try:
        if _may_be_alive(os.read(descriptor, 1024).decode(errors="replace")):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except IsADirectoryError:  # then nobody can hold it
        return False
    finally:
        os.close(descriptor)
    return False


def _may_be_alive(holder: str) -> bool:
    """Whether the process that the lock file names may be alive: one on another host may be."""
    match = re.fullmatch(r"process (\d+) on (.*)", holder)
    if match is not None and match[2] == socket.gethostname():
        try:
            os.kill(int(match[1]), 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # alive, and another user's
            pass
    return True


def _is_same_file(descriptor: int, path: Path) -> bool:
    """Whether `path` still names the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def create(connection: sqlite3.Connection) -> None:
    """Create the tables in an empty file."""
    # The journal mode is stored in the file. One transaction creates all tables, so a crash leaves
    # all of them or an empty file, in which the next call of `open_for_writing` creates them. After
    # the checkpoint, the file is a store without its `-wal`.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(
        f"BEGIN; {_TABLES} INSERT INTO meta VALUES ('schema_version', {SCHEMA_VERSION}); COMMIT;"
    )
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def connect(path: Path) -> sqlite3.Connection:
    """Open an SQLite file read-only, which works while another process writes to it."""
    uri = f"file:{quote(str(path.resolve()))}?mode=ro"
    # Reading a WAL database creates a lock file beside it. A read-only directory (an archived run)
    # has no writer, so SQLite may read without locks.
    if not os.access(path.parent, os.W_OK) and not Path(f"{path}-wal").exists():
        uri += "&immutable=1"
    # A reader may pass between threads, of which one at a time uses it.
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open the store read-only. Raises `UserError` if it is missing or no store of this version."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    with ExitStack() as undo:
        try:
            connection = undo.enter_context(closing(connect(path)))
            check_version(connection, path)
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be opened as an event store: {error}") from error
        undo.pop_all()
    return connection


def check_version(connection: sqlite3.Connection, path: Path) -> None:
    """Raise `UserError` if the file is no event store of this schema version."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    if "meta" not in tables or "events" not in tables:
        raise UserError(f"{path}: is a database, but not an event store of Rhymeflow")
    found = _meta(connection, "schema_version")
    if found != SCHEMA_VERSION:
        raise UserError(
            f"{path}: has schema version {found}, and this Rhymeflow ({source_version()}) reads "
            f"{SCHEMA_VERSION}; {written_by(connection)} wrote it: install that version (SQL reads "
            "it in any case)"
        )


def written_by(connection: sqlite3.Connection) -> str:
    """Return the version of Rhymeflow that wrote the last attempt."""
    return str(_meta(connection, "written_by") or "an earlier Rhymeflow")


def note_writer(connection: sqlite3.Connection) -> None:
    """Store this version of Rhymeflow as the writer, within the open transaction."""
    written_by = f"Rhymeflow {source_version()}"
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('written_by', ?)", (written_by,))


def _meta(connection: sqlite3.Connection, key: str) -> object:
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return row[0] if row else None
