"""Copies a run to other storage at each checkpoint, and rebuilds the run from there.

The storage holds:
    ATTEMPT/beginning.json        which run the attempt is of
    ATTEMPT/rows/NNNNNNNN.db      rows that the store got since the previous backup, as SQLite
    ATTEMPT/inputs/...            objects that a Trainer was given
    ATTEMPT/NNNNNNNN/...          the checkpoint, and small files of the run directory
    ATTEMPT/NNNNNNNN/backup.json  written last: the names of all files of the run, and their digests
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec
from msgspec import DecodeError

from rhymeflow.core.types import Version
from rhymeflow.errors import UserError, to_resume
from rhymeflow.store import schema
from rhymeflow.store.checkpoint_dirs import CHECKPOINTS, CheckpointPlace, where_of
from rhymeflow.store.schema import CHANGES_KEYS, EVENTS, PUBLISHED, SCHEMA_VERSION
from rhymeflow.utils import disk
from rhymeflow.utils.disk import flush
from rhymeflow.utils.storage import Damaged, Storage, StoredFile, Unreachable

STATE, STAGING = "backup.json", "backup-upload"
"""Names in the run directory: the state of the backup, and links to files that are being copied."""

CHANGING_FILES = ("config.yaml", "trackers.json", "metrics.jsonl")
"""Files of the run directory that change: each backup copies them anew."""

LAYOUT = 2  # version of the format of a backup

KEPT_CHECKPOINTS = 2  # number of checkpoints of an attempt that stay in the backup

RETRY_SECONDS = (1.0, 60.0)  # waiting time between two tries, at first and at most

END_SECONDS = 60.0  # how long the end of an attempt waits for its last backup


class StorePosition(msgspec.Struct, frozen=True):
    """What a store contains."""

    position: dict[str, int]  # number of the last row of each table in `GROWING`
    last_event: tuple[int, float]  # number and time of the last event
    published: int  # the newest version
    pruned_before: int  # tokens of groups that ended under earlier versions are deleted


class Backup(msgspec.Struct, frozen=True):
    """What a run is rebuilt from. Earlier backups and attempts may have written the files."""

    state: StorePosition
    version: int  # version of the checkpoint
    files: dict[str, StoredFile]  # by path in the run directory
    rows: list[StoredFile]
    """Files of rows, in the order in which they are inserted into an empty store."""
    run_dir: str


class Beginning(msgspec.Struct, frozen=True):
    """What an attempt writes first to its directory in the storage."""

    run: str
    schema: int
    layout: int = 1


class BackupStorage(Storage):
    """Where the backups of a run are."""

    def __init__(self, url: str) -> None:
        super().__init__(url, "run.backup")

    def attempts(self) -> dict[str, Beginning]:
        """Return the attempts that have written here, oldest first."""
        beginnings = {name: self.beginning(name) for name in self.names("")}
        return {name: each for name, each in beginnings.items() if each is not None}

    def beginning(self, attempt: str) -> Beginning | None:
        """Return what an attempt wrote first, or None if `attempt` names no attempt."""
        return self.get(f"{attempt}/beginning.json", Beginning)

    def backups(self, attempts: Iterable[str]) -> Iterator[tuple[str, Backup | None]]:
        """Yield directory and backup, None if it is incomplete, of these attempts, newest first."""
        for attempt in sorted(attempts, reverse=True):
            for number in sorted(filter(str.isdigit, self.names(attempt)), reverse=True):
                name = f"{attempt}/{number}"
                yield name, self.get(f"{name}/backup.json", Backup)


class Copied(msgspec.Struct):
    """The state of a run's backup: it contains the log up to the event of this number and time."""

    url: str
    event: int = 0
    time: float = 0.0
    problem: str | None = None


def copied(run_dir: Path) -> Copied | None:
    """Return the state of the backup of the run in `run_dir`, or None if it has none."""
    try:
        return msgspec.json.decode((run_dir / STATE).read_bytes(), type=Copied)
    except (FileNotFoundError, DecodeError):
        return None


def check_free(url: str | None) -> None:
    """Raise `UserError` if the storage holds a run already. Storage that cannot be reached passes:
    a new run tries it again later."""
    if url is None:
        return
    if Path(url).is_file():
        raise UserError(f"run.backup: {url} is a file; give a directory or a URL")
    storage, attempts = BackupStorage(url), dict[str, Beginning]()
    with suppress(Unreachable):
        attempts = storage.attempts()
    if attempts:
        raise UserError(
            f"run.backup: {url} holds a run already; `{to_resume(url)}` resumes it, or name "
            "another directory"
        )


# -- rows ------------------------------------------------------------------------------------------

GROWING = {"events": "seq", "commands": "seq", "changes": "seq", "segments": "rowid",
           "snapshots": "event"}  # fmt: skip
"""Tables whose rows never change, and the column that numbers them upwards."""
_ATTEMPTS = "SELECT started, config FROM attempts ORDER BY attempt"
_LAST_EVENT = "SELECT seq, time FROM events ORDER BY seq DESC LIMIT 1"
_PRUNED_BEFORE = "SELECT value FROM meta WHERE key = 'pruned_before'"


def state_of(connection: sqlite3.Connection) -> StorePosition:
    """Return what the store contains."""
    position = {}
    for table, column in GROWING.items():
        newest = f"SELECT COALESCE(MAX({column}), 0) FROM {table}"
        (position[table],) = connection.execute(newest).fetchone()
    last_event = connection.execute(_LAST_EVENT).fetchone() or (0, 0.0)
    (published,) = connection.execute(PUBLISHED).fetchone() or (0,)
    (pruned_before,) = connection.execute(_PRUNED_BEFORE).fetchone() or (0,)
    return StorePosition(position, last_event, published, pruned_before)


def read_rows(connection: sqlite3.Connection, target: Path, since: dict[str, int]) -> StorePosition:
    """Write what came after position `since` to the file `target`, in one read transaction. These
    are the new rows of tables in `GROWING`, and the present state of rows that `changes` lists in
    the others. The cost is in proportion to what came since, and deleted rows are left out."""
    execute = connection.execute
    execute(f"ATTACH '{target.resolve().as_uri()}?mode=rwc' AS part")
    try:
        execute("PRAGMA part.journal_mode = OFF")
        execute("PRAGMA part.synchronous = OFF")
        execute("BEGIN")
        state = state_of(connection)
        rows = {
            table: f"main.{table} t WHERE t.{column} > {since.get(table, 0)}"
            for table, column in GROWING.items()
        }
        rows["snapshots"] += " ORDER BY event DESC LIMIT 1"
        rows["meta"] = "main.meta t"
        for table, key in CHANGES_KEYS.items():
            columns = list(zip(key, "ab", strict=False))
            names = ", ".join(name for _, name in columns)
            rows[table] = (
                f"(SELECT DISTINCT {names} FROM part.changes WHERE what = '{table}') n "
                f"CROSS JOIN main.{table} t ON "
                + " AND ".join(f"t.{column} = n.{name}" for column, name in columns)
            )
        for table, selected in rows.items():
            number = "t.rowid, " if table == "segments" else ""  # `follow.py` reads by row number
            execute(f"CREATE TABLE part.{table} AS SELECT {number}t.* FROM {selected}")
        execute("COMMIT")
    finally:
        if connection.in_transaction:
            execute("ROLLBACK")
        execute("DETACH part")
    return state


def apply_rows(connection: sqlite3.Connection, part: Path) -> None:
    """Add what `read_rows` wrote to `part` to a store that is at its position `since`."""
    execute = connection.execute
    execute(f"ATTACH '{part.resolve().as_uri()}' AS part")
    execute("BEGIN")
    pruned = "group_id IN (SELECT a FROM part.changes WHERE what = 'pruned')"
    execute(f"DELETE FROM main.segments WHERE {pruned}")
    execute(f"DELETE FROM main.token_details WHERE {pruned}")
    execute(f"UPDATE main.trajectories SET text = NULL WHERE {pruned}")
    for table, key in CHANGES_KEYS.items():
        changed = f"SELECT {', '.join('ab'[: len(key)])} FROM part.changes WHERE what = '{table}'"
        execute(f"DELETE FROM main.{table} WHERE ({', '.join(key)}) IN ({changed})")
    for table in (*GROWING, *CHANGES_KEYS, "meta"):
        names = ", ".join(f'"{row[1]}"' for row in execute(f"PRAGMA part.table_info({table})"))
        execute(f"INSERT OR REPLACE INTO main.{table} ({names}) SELECT {names} FROM part.{table}")
    newest = "SELECT event FROM main.snapshots ORDER BY event DESC LIMIT 2"  # as the writer keeps
    execute(f"DELETE FROM main.snapshots WHERE event NOT IN ({newest})")
    execute("COMMIT")
    execute("DETACH part")


# -- making a backup -------------------------------------------------------------------------------


class BackupThread:
    """Makes the backups of one attempt at the run in `run_dir`, and retries after failures. The run
    waits for the thread only at its end, for `END_SECONDS` at most."""

    def __init__(self, run_dir: Path, url: str) -> None:
        """Raise `UserError` if fsspec does not know the kind of storage."""
        self._run_dir, self._staging, self._storage = run_dir, run_dir / STAGING, BackupStorage(url)
        self._thread = threading.Thread(target=self._serve, name="backup", daemon=True)
        self._due, self._ends_at = threading.Event(), float("inf")
        self._made_at = time.monotonic()
        self._problem: str | None = None  # of the last try, if that failed
        self._reported: str | None = None  # the last problem that the user was told
        self._defect: BaseException | None = None  # what ended the thread
        self._attempt, self._number = "", 0  # in the storage: this attempt, its last backup
        self._last: Backup | None = None
        self._saved, self._pinned = -1, set[Version]()
        """In `run.checkpoint_dir`: the newest checkpoint (-1: none), and those that are named."""
        self._copied: dict[str, StoredFile] = {}
        """Files that are copied already, by path in the run directory."""

    def start(self) -> None:
        """Start the thread. The store must exist, and `claimed_place` know the checkpoints."""
        self._place = CheckpointPlace(where_of(self._run_dir))
        self._pinned = set(self._place.up_to()) if self._place.is_elsewhere else set()
        self._saved = max(self._pinned, default=-1)
        self._made_at = time.monotonic()
        self._due.set()
        self._thread.start()

    def saved(self, version: Version) -> None:
        """Make a backup soon, because a checkpoint is complete."""
        self._saved = version
        self._due.set()

    @property
    def needed(self) -> set[Version] | None:
        """The checkpoints that must stay, or None if they are copied. The controller asks it before
        a new one is begun, in the thread that calls `saved`."""
        return {self._saved, *self._pinned} if self._place.is_elsewhere else None

    def _checkpoints(self) -> Collection[Version]:
        """Return the checkpoints that a backup can contain or name."""
        if not self._place.is_elsewhere:
            return self._place.up_to()
        while True:
            saved, last = self._saved, self._last
            self._pinned = {saved} if last is None else {saved, last.version}
            if saved == self._saved:  # else a newer one may have been begun without it
                return self._pinned - {-1}

    @property
    def behind(self) -> float:
        """Age of the last backup in seconds: what a loss of the run directory would cost."""
        return time.monotonic() - self._made_at

    def notice(self) -> str | None:
        """Return a line for the user when backups begin to fail or succeed again, else None. Raises
        an unexpected exception of the thread."""
        if self._defect is not None:
            defect, self._defect = self._defect, None
            raise defect
        problem = self._problem
        if (problem is None) == (self._reported is None):
            return None
        self._reported = problem
        if problem is None:
            return f"backup {self._storage.url}: is up to date again"
        return f"backup {self._storage.url}: {problem}; the run continues, and retries this"

    def close(self) -> None:
        """Make the last backup, and wait for it for `END_SECONDS` at most."""
        if self._thread.is_alive():
            self._ends_at = time.monotonic() + END_SECONDS
            self._due.set()
            self._thread.join(END_SECONDS + 1.0)
        if self._defect is not None:
            raise self._defect

    def _serve(self) -> None:
        try:
            with closing(schema.open_for_reading(self._run_dir / EVENTS)) as connection:
                self._make_backups(connection)
        except BaseException as error:  # noqa: BLE001 - the controller's thread raises it
            self._defect = error
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)

    def _make_backups(self, connection: sqlite3.Connection) -> None:
        """Make a backup whenever one is due, and retry a failed one, until `close`."""
        wait: float | None = None  # seconds; None: until a backup is due
        while True:
            self._due.wait(wait)
            self._due.clear()
            is_last = self._ends_at < float("inf")
            try:
                is_complete = self._make(connection, is_last=is_last)
            except (Unreachable, OSError, sqlite3.DatabaseError) as error:
                first, most = (0.1, 1.0) if is_last else RETRY_SECONDS
                wait, is_complete = min(max(2 * (wait or 0.0), first), most), False
                self._problem = " ".join(str(error).split())
                self._write_state()
            else:
                wait, self._problem = None if is_complete else 0.1, None
            if is_last and (is_complete or time.monotonic() > self._ends_at):
                return

    def _write_state(self) -> None:
        if self._run_dir.is_dir():
            number, when = self._last.state.last_event if self._last else (0, 0.0)
            state = Copied(self._storage.url, number, when, self._problem)
            disk.replace(self._run_dir / STATE, msgspec.json.encode(state))

    def _begin(self, connection: sqlite3.Connection) -> None:
        """Create this attempt's directory, and find a backup of an earlier one to continue. Raises
        `Unreachable` if the storage holds another run."""
        started, config = connection.execute(_ATTEMPTS).fetchone()
        run = f"{started}, seed {msgspec.json.decode(config)['run']['seed']}"
        known = self._storage.attempts()
        if others := [name for name, each in known.items() if each.run != run]:
            raise Unreachable(f"it holds another run ({others[0]}); name another directory")
        for _, backup in self._storage.backups(known):
            if backup is not None and _continues(connection, backup.state):
                self._last, self._copied = backup, dict(backup.files)
                break
        name = f"{int(max(known, default='000000')[:6]) + 1:06d}-{uuid.uuid4().hex[:12]}"
        self._storage.write(f"{name}/beginning.json", Beginning(run, SCHEMA_VERSION, LAYOUT))
        self._attempt = name

    def _make(self, connection: sqlite3.Connection, *, is_last: bool) -> bool:
        """Copy the newest checkpoint and the new rows; return whether the backup is up to date."""
        shutil.rmtree(self._staging, ignore_errors=True)
        self._staging.mkdir()
        if not self._attempt:
            self._begin(connection)
        self._check_is_newest()
        ((published,),) = connection.execute(PUBLISHED).fetchall() or [(0,)]
        last, checkpoints = self._last, self._checkpoints()
        version = max((each for each in checkpoints if each <= published), default=None)
        # The version of a newer checkpoint has no event in the store yet: it is copied later.
        is_newest = is_last or version == max(checkpoints, default=None)
        if version is None or (not is_last and last is not None and version == last.version):
            return is_newest
        began, files = time.monotonic(), self._staging / "files"
        source = self._run_dir / CHECKPOINTS / f"step-{version}"
        # Links keep the checkpoint's files while they are copied. The rows are read between linking
        # and copying, so that the tokens that a resumed run would need are not deleted yet.
        try:
            if self._place.is_elsewhere:
                files.mkdir()
            else:
                shutil.copytree(source, files / CHECKPOINTS / source.name, copy_function=os.link)
            if (inputs := self._run_dir / "inputs").is_dir():
                shutil.copytree(inputs, files / inputs.name, copy_function=os.link)
        except OSError:
            if source.is_dir():
                raise
            return False  # the run has deleted it, since a newer one is complete
        state = read_rows(
            connection, self._staging / "rows.db", last.state.position if last else {}
        )
        if state.pruned_before > version:
            return False  # a run restored from this checkpoint would lack tokens
        if last and (last.version, last.state.position) == (version, state.position):
            return True
        for name in CHANGING_FILES:  # after the rows: a step's metrics are written before its event
            if (self._run_dir / name).is_file():
                shutil.copyfile(self._run_dir / name, files / name)
        self._copy(state, version)
        self._made_at = began
        return is_newest

    def _check_is_newest(self) -> None:
        """Raise `Unreachable` if a later attempt writes here, or the directory was deleted."""
        names = self._storage.names("")
        if self._attempt not in names:
            raise Unreachable(f"{self._attempt} was deleted")
        if later := [
            name for name in names if name > self._attempt and self._storage.beginning(name)
        ]:
            raise Unreachable(
                f"{later[-1]} continues this run, so this attempt is not copied any more"
            )

    def _copy(self, state: StorePosition, version: int) -> None:
        """Put the linked files, the rows and then `backup.json`; delete old checkpoints."""
        attempt, number, last = self._attempt, self._number + 1, self._last
        target, staged, files = f"{attempt}/{number:08d}", self._staging / "files", {}
        new = self._storage.put(f"{attempt}/rows/{number:08d}.db", self._staging / "rows.db")
        for path in filter(Path.is_file, sorted(staged.rglob("*"))):
            name = path.relative_to(staged).as_posix()
            if name in CHANGING_FILES or name not in self._copied:
                folder = attempt if name.startswith("inputs/") else target
                self._copied[name] = self._storage.put(f"{folder}/{name}", path)
            files[name] = self._copied[name]
        rows, where = [*(last.rows if last else []), new], str(self._run_dir.resolve())
        backup = Backup(state, version, files, rows, where)
        self._storage.write(f"{target}/backup.json", backup)
        self._last, self._copied, self._number, self._problem = backup, files, number, None
        if last is None or last.version != version:  # else an earlier backup has the checkpoint
            for old in filter(str.isdigit, self._storage.names(attempt)):
                if int(old) <= number - KEPT_CHECKPOINTS:
                    self._storage.remove(f"{attempt}/{old}")
        self._write_state()


def _continues(connection: sqlite3.Connection, state: StorePosition) -> bool:
    """Whether a store still has everything of this state: a loss of power may have lost its end."""
    number, when = state.last_event
    event = connection.execute("SELECT time FROM events WHERE seq = ?", (number,)).fetchone()
    position = state_of(connection).position
    return event == (when,) and all(position[t] >= last for t, last in state.position.items())


# -- rebuilding the run ----------------------------------------------------------------------------


def restore(url: str, run_dir: Path | None = None) -> tuple[Path, list[str]]:
    """Rebuild the run in `run_dir`, by default its old directory, from the newest complete backup.
    Return the directory, and lines for the user. Raises `UserError` if there is no run, the storage
    cannot be read, or no backup is complete."""
    storage, notes, damaged = BackupStorage(url), list[str](), set[str]()
    try:
        known = storage.attempts()
        if not known:
            raise UserError(f"{url}: is no backup of a run")
        newest = known[max(known)]
        if (newest.schema, newest.layout) != (SCHEMA_VERSION, LAYOUT):
            raise UserError(
                f"{url}: has schema version {newest.schema}, layout {newest.layout}, and this "
                f"Rhymeflow reads {SCHEMA_VERSION}, layout {LAYOUT}"
            )
        for name, backup in storage.backups(known):
            if backup is None:
                notes.append(f"{name} is incomplete: it is left out")
                continue
            if any(file.name in damaged for file in (*backup.files.values(), *backup.rows)):
                continue
            target = run_dir or Path(backup.run_dir)
            try:
                _rebuild(storage, backup, target)
            except Damaged as error:
                damaged.add(error.args[0])
                notes.append(f"{' '.join(error.args)}: backups that need it are left out")
                continue
            restored = f"{url}: the log up to event {backup.state.last_event[0]:,}"
            return target, [f"{restored}, version {backup.state.published}", *notes]
    except Unreachable as error:
        raise UserError(f"{url}: {error}") from None
    raise UserError(f"{url}: no backup in it is complete: {'; '.join(notes) or 'there is none'}")


def _rebuild(storage: BackupStorage, backup: Backup, run_dir: Path) -> None:
    """Create the run directory. Raises `Damaged`, or `UserError` if it cannot be created."""
    if run_dir.exists() and any(run_dir.iterdir()):
        raise UserError(f"--output_dir {run_dir}: is not empty; name a new directory")
    unfinished = run_dir.with_name(f"{run_dir.name}.from-backup-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        for path, file in backup.files.items():
            storage.get_file(file, unfinished / path)
        _rebuild_store(storage, backup.rows, unfinished)
        run_dir.mkdir(exist_ok=True)
        unfinished.replace(run_dir)
    except OSError as error:
        raise UserError(f"--output_dir {run_dir}: cannot be created: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _rebuild_store(storage: BackupStorage, rows: Iterable[StoredFile], folder: Path) -> None:
    part = folder / "part.db"
    with closing(sqlite3.connect(folder / EVENTS, isolation_level=None, uri=True)) as connection:
        schema.create(connection)
        connection.execute("PRAGMA journal_mode = OFF")  # a failure discards the file
        connection.execute("PRAGMA synchronous = OFF")
        for file in rows:
            storage.get_file(file, part)
            apply_rows(connection, part)
            part.unlink()
        connection.execute("PRAGMA journal_mode = WAL")
    flush(folder / EVENTS)
