"""The tables of `events.db`, their version, and how the file is opened.

Holds true: a file that opens has a schema of `READABLE`, and what is written to it has this one;
one writer at a time has it open for writing
(the operating system's lock ends with the process that holds it); a reader never writes. Knows
nothing of what the tables mean to the coordinator.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rhymeflow.core.types import HELD_OUT
from rhymeflow.errors import UserError, to_resume
from rhymeflow.utils.source_version import source_version

EVENTS = "events.db"
"""The file, in its run directory."""

SCHEMA_VERSION = 16
"""Of the tables and of what events and commands hold: a log that cannot be read is refused by its
number."""

READABLE = {8, 9, 10, 11, 12, 13, 14, 15, SCHEMA_VERSION}
"""8 has no snapshots, and up to 9 nothing was pruned and changes were not noted; they get the
tables when they are written to (`bring_up_to_date`). Up to 10 there are no events of turns,
and 11 has them without their figures. Up to 12 there is one suite, and one answer to a prompt.
Up to 13 no snapshot of an instance has seconds of prefill. Up to 14 the gradient of a batch is
begun when it is complete. Up to 15 no reward says what it is the sum of."""

SAME_ROWS = {10, 11, 12, 13, 14, 15, SCHEMA_VERSION}
"""Whose rows can be put into these tables, by `row_of_now`."""

_LAST_WRITERS = {5: "01adc8d", 6: "a3fa83b", 7: "8fce5f6"}
"""The last commit of Rhymeflow that read and wrote an older schema. None of them was released."""

LOCK = "writer.lock"
"""Is locked while a controller carries the run on, and names it. The lock ends with the process."""

# docs/run-directory.md describes each table, and has queries.
#
# An attempt begins where a run is started or resumed; its events are those from `first_event` on.
# Blobs are little-endian: int32 tokens, float32 log-probabilities. A command belongs to the event
# upon which it was given (for most, a `Tick`). `trajectories` holds what has finished, its `text`
# once it was decoded; `trained` is the batch a trajectory was trained on in. A
# member that its consumed group did not need (there were more than num_generations) counts as
# aborted. `steps` is the number of iterations that generated a segment's tokens, `drafted` of the
# tokens that were proposed in them. `held_out` has the prompts that `evaluations` answers, of all
# suites. With `run.token_details` there is a byte for each token: in `segments.accepted` 1 if it
# was drafted, in `token_details.flags` what the learner did about it (`learner/token_details.py`).
# `pruned` has what is left of segments whose tokens were deleted (`pruning.py`), `spans` is both
# together, but for what environments answered, which took no `steps`.
# `changes` names each row, outside the tables that only grow, that was put, changed or taken out:
# what copies the store (`rhymeflow/mirror`) reads from there on. An `a` and `b` of 0 may mean none.
_SNAPSHOTS = "CREATE TABLE snapshots (event INTEGER PRIMARY KEY, state BLOB NOT NULL);"
_PRUNED = """
CREATE TABLE pruned (group_id INTEGER NOT NULL, member INTEGER NOT NULL, start INTEGER NOT NULL,
    length INTEGER NOT NULL, version INTEGER NOT NULL, instance TEXT NOT NULL,
    steps INTEGER NOT NULL, drafted INTEGER NOT NULL, PRIMARY KEY (group_id, member, start));
CREATE TABLE changes (seq INTEGER PRIMARY KEY, what TEXT NOT NULL, a INTEGER NOT NULL,
    b INTEGER NOT NULL);
"""
_SPANS = """CREATE {temp} VIEW spans AS
    SELECT group_id, member, start, LENGTH(tokens) / 4 AS length, version, instance, steps, drafted
    FROM segments WHERE steps > 0 UNION ALL
    SELECT group_id, member, start, length, version, instance, steps, drafted FROM pruned
    WHERE steps > 0;"""
_NOTHING_PRUNED = f"""
CREATE TEMP VIEW pruned AS SELECT group_id, member, start, LENGTH(tokens) / 4 AS length, version,
    instance, steps, drafted FROM segments WHERE FALSE;
{_SPANS.format(temp="TEMP")}
"""
_VIEWS = f"""
{_SPANS.format(temp="")}
CREATE VIEW responses AS
    SELECT group_id, member, s.length, s.first_version, t.reason, t.reward, t.trained,
        CASE WHEN t.trained IS NOT NULL THEN 'consumed' WHEN g.ending = 'consumed' THEN 'aborted'
            ELSE g.ending END AS ending
    FROM (SELECT group_id, member, SUM(LENGTH(tokens)) / 4 AS length, MIN(version) AS first_version
            FROM segments GROUP BY group_id, member UNION ALL
        SELECT group_id, member, SUM(length), MIN(version) FROM pruned GROUP BY group_id, member) s
    JOIN groups g USING (group_id) LEFT JOIN trajectories t USING (group_id, member);
"""
_SUITES = """
CREATE TABLE held_out (suite TEXT NOT NULL, row INTEGER NOT NULL, prompt TEXT NOT NULL,
    prompt_tokens BLOB NOT NULL, PRIMARY KEY (suite, row));
CREATE TABLE evaluations (version INTEGER NOT NULL, suite TEXT NOT NULL, row INTEGER NOT NULL,
    sample INTEGER NOT NULL, tokens BLOB NOT NULL, text TEXT NOT NULL, reward REAL NOT NULL,
    PRIMARY KEY (version, suite, row, sample));
"""
_OLD_HELD_OUT = f"SELECT '{HELD_OUT}' AS suite, row, prompt, prompt_tokens FROM {{}}"
_OLD_EVALUATIONS = f"""SELECT rowid AS rowid, version, '{HELD_OUT}' AS suite, row, 0 AS sample,
    tokens, text, reward FROM {{}}"""
_ONE_SUITE = f"""
CREATE TEMP VIEW held_out AS {_OLD_HELD_OUT.format("main.held_out")};
CREATE TEMP VIEW evaluations AS {_OLD_EVALUATIONS.format("main.evaluations")};
"""
_TO_SUITES = f"""
ALTER TABLE held_out RENAME TO old_held_out;
ALTER TABLE evaluations RENAME TO old_evaluations;
{_SUITES}
INSERT INTO held_out {_OLD_HELD_OUT.format("old_held_out")};
INSERT INTO evaluations (rowid, version, suite, row, sample, tokens, text, reward)
    {_OLD_EVALUATIONS.format("old_evaluations")};
DROP TABLE old_held_out;
DROP TABLE old_evaluations;
"""
NOTED: Mapping[str, tuple[str, ...]] = {
    "attempts": ("attempt",),
    "groups": ("group_id",),
    "trajectories": ("group_id", "member"),
    "token_details": ("group_id", "member"),
    "held_out": ("row",),
    "evaluations": ("version", "row"),
    "pruned": ("group_id",),
}
"""Tables whose rows `changes` names, and the columns that its `a` and `b` are: of `held_out` and
`evaluations` those of all suites together."""
_TABLES = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value);
CREATE TABLE attempts (attempt INTEGER PRIMARY KEY, first_event INTEGER NOT NULL,
    time REAL NOT NULL, started TEXT NOT NULL, config TEXT NOT NULL);
CREATE TABLE events (seq INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL,
    body TEXT NOT NULL);
CREATE TABLE commands (seq INTEGER PRIMARY KEY, event INTEGER NOT NULL, kind TEXT NOT NULL,
    body TEXT NOT NULL);
{_SNAPSHOTS}
CREATE TABLE groups (group_id INTEGER PRIMARY KEY, row INTEGER NOT NULL, epoch INTEGER NOT NULL,
    prompt TEXT NOT NULL, prompt_tokens BLOB NOT NULL, columns TEXT NOT NULL,
    ending TEXT, ending_version INTEGER, ending_reason TEXT);
CREATE TABLE segments (group_id INTEGER NOT NULL, member INTEGER NOT NULL, start INTEGER NOT NULL,
    version INTEGER NOT NULL, instance TEXT NOT NULL, steps INTEGER NOT NULL,
    drafted INTEGER NOT NULL, tokens BLOB NOT NULL, logprobs BLOB NOT NULL, accepted BLOB,
    PRIMARY KEY (group_id, member, start));
CREATE TABLE trajectories (group_id INTEGER NOT NULL, member INTEGER NOT NULL,
    length INTEGER NOT NULL, reason TEXT NOT NULL, text TEXT,
    reward REAL, components TEXT, trained INTEGER, PRIMARY KEY (group_id, member));
CREATE TABLE token_details (group_id INTEGER NOT NULL, member INTEGER NOT NULL, logprobs BLOB,
    flags BLOB NOT NULL, PRIMARY KEY (group_id, member));
{_SUITES}{_PRUNED}{_VIEWS}CREATE VIEW trained AS
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


def open_for_writing(path: Path, *, is_new: bool) -> tuple[sqlite3.Connection, int]:
    """Open or create the store; return the connection and the descriptor that holds the lock.

    The lock is on a file beside it, so that no second controller works in one run directory.

    Raises:
        UserError: no such directory, another process writes here, the file is not ours, or there is
            one although it was to be new.
    """
    if is_new:
        refuse_another(path)
    lock = lock_directory(path.parent)
    try:
        if is_new:  # nobody else makes one now
            refuse_another(path)
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            if not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                _create(connection)
            check_version(connection, path)
            connection.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.DatabaseError as error:
            connection.close()
            raise UserError(f"{path}: cannot be opened as an event store: {error}") from error
        except UserError:
            connection.close()
            raise
    except BaseException:
        os.close(lock)
        raise
    return connection, lock


def refuse_another(path: Path) -> None:
    """Raise `UserError` if there is a store, where a run is to begin."""
    if path.exists():
        from rhymeflow.store.writing import is_written

        goes_on = f"`{to_resume(path.parent)}` goes on with it, or"
        what = "a run, which goes on;" if is_written(path.parent) else f"a run already; {goes_on}"
        raise UserError(f"run.output_dir: {path.parent} holds {what} name another directory")


def lock_directory(directory: Path) -> int:
    """Take the lock; the file says who has it. Return the descriptor that holds it."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory")
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        who = os.read(descriptor, 1024).decode()
        os.close(descriptor)
        raise UserError(f"{directory}: {who} is writing to this run") from error
    if not _is_there(descriptor, directory / LOCK):  # a run that failed took it away meanwhile
        os.close(descriptor)
        return lock_directory(directory)
    os.truncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return descriptor


def _is_there(descriptor: int, path: Path) -> bool:
    """Whether this is the file of that name, still."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _create(connection: sqlite3.Connection) -> None:
    # The journal mode stays with the file. The tables come in one transaction, so that a crash
    # leaves all of them or an empty file, which the next opening fills. They go into the
    # file at once: whatever becomes of the `-wal`, it is a store.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(
        f"BEGIN; {_TABLES} INSERT INTO meta VALUES ('schema_version', {SCHEMA_VERSION}); COMMIT;"
    )
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def create(path: Path) -> None:
    """Make an empty store, to be filled by somebody else than a run."""
    connection = sqlite3.connect(path, isolation_level=None)
    _create(connection)
    connection.close()


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open the store read-only; works while the writer writes.

    Raises:
        UserError: no such file, or not a store of this schema.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    uri = f"file:{quote(str(path.resolve()))}?mode=ro"
    # Reading a WAL database makes a lock file beside it. In a directory that cannot be written
    # (an archived run) there is no writer either, and SQLite may read without locks.
    if not os.access(path.parent, os.W_OK) and not Path(f"{path}-wal").exists():
        uri += "&immutable=1"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None)
    try:
        check_version(connection, path)
        if not has_pruned(connection):
            connection.executescript(_NOTHING_PRUNED)
        if not has_suites(connection):
            connection.executescript(_ONE_SUITE)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        connection.close()
        raise UserError(f"{path}: cannot be opened as an event store: {error}") from error
    except UserError:
        connection.close()
        raise
    return connection


def check_version(connection: sqlite3.Connection, path: Path) -> None:
    """Raise `UserError` if the file's schema is not one that this code reads and writes."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    if "meta" not in tables or "events" not in tables:
        raise UserError(f"{path}: is a database, but not an event store of Rhymeflow")
    found = _meta(connection, "schema_version")
    if found not in READABLE:
        raise UserError(
            f"{path}: has schema version {found}, and this Rhymeflow ({source_version()}) reads "
            f"{', '.join(map(str, sorted(READABLE)[:-1]))} and {SCHEMA_VERSION}; "
            f"{_what_reads(found, connection)}"
        )


def written_by(connection: sqlite3.Connection) -> str:
    """The Rhymeflow that wrote the last attempt."""
    return str(_meta(connection, "written_by") or "an earlier Rhymeflow")


def has_snapshots(connection: sqlite3.Connection) -> bool:
    """Whether the store has the table, which schema version 8 has not."""
    return bool(_meta(connection, "schema_version") != 8)


def has_pruned(connection: sqlite3.Connection) -> bool:
    """Whether the store has the tables that came with schema version 10."""
    return _meta(connection, "schema_version") not in (8, 9)


def has_suites(connection: sqlite3.Connection) -> bool:
    """Whether the store has the tables that came with schema version 13."""
    return _meta(connection, "schema_version") not in range(8, 13)


def row_of_now(table: str, row: Sequence[Any]) -> Sequence[Any]:
    """Return a row of a store of `SAME_ROWS` as it is in these tables."""
    match table, list(row):
        case "held_out", [number, prompt, tokens]:
            return HELD_OUT, number, prompt, tokens
        case "evaluations", [version, number, tokens, text, reward]:
            return version, HELD_OUT, number, 0, tokens, text, reward
    return row


def bring_up_to_date(connection: sqlite3.Connection) -> None:
    """Within a transaction: what an older schema lacks, and who writes from now on."""
    if not has_snapshots(connection):
        connection.execute(_SNAPSHOTS)
    if not has_pruned(connection):
        for statement in f"{_PRUNED}DROP VIEW responses;{_VIEWS}".split(";"):
            connection.execute(statement)  # a script would end the transaction
        for table, columns in NOTED.items():
            a, b = (*columns, "0")[:2]
            note = f"INSERT INTO changes (what, a, b) SELECT ?, {a}, {b} FROM {table}"
            connection.execute(note, (table,))
    if not has_suites(connection):
        for statement in _TO_SUITES.split(";"):
            connection.execute(statement)
    values = ("schema_version", SCHEMA_VERSION), ("written_by", f"Rhymeflow {source_version()}")
    connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values)


def _what_reads(schema: object, connection: sqlite3.Connection) -> str:
    """What to do about a schema that this version does not read."""
    if schema in _LAST_WRITERS:
        commit = _LAST_WRITERS[schema]  # type: ignore[index]
        return (
            f"commit {commit} does: `git worktree add ../rhymeflow-{commit} {commit}` in a clone, "
            "`pip install -e` there (SQL reads it in any case)"
        )
    return f"{written_by(connection)} wrote it: install that version (SQL reads it in any case)"


def _meta(connection: sqlite3.Connection, key: str) -> object:
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return row[0] if row else None
