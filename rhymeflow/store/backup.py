"""A copy of a run in other storage, made at each checkpoint, and the run rebuilt from there.

ATTEMPT/beginning.json         which run it is of
ATTEMPT/rows/NNNNNNNN.db       what the store has got since the backup before, as SQLite
ATTEMPT/inputs/...             what a Trainer was given as objects
ATTEMPT/NNNNNNNN/...           the checkpoint, and small files of the run directory
ATTEMPT/NNNNNNNN/backup.json   written last: where all files of the run are, and their digests
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash
from msgspec import DecodeError

from rhymeflow.errors import UserError, to_resume
from rhymeflow.store import schema
from rhymeflow.store.checkpoint_dirs import CHECKPOINTS, checkpoints_up_to
from rhymeflow.store.schema import EVENTS, NOTED, PUBLISHED, SCHEMA_VERSION
from rhymeflow.utils import disk
from rhymeflow.utils.disk import flush

STATE, HELD = "backup.json", "backup-upload"
"""In the run directory: how much of the run is in its backup, and what is being copied."""

FILES = ("config.yaml", "trackers.json", "metrics.jsonl")
"""Files of the run directory that change: each backup has all of them."""

LAYOUT = 2
"""Version of the files in a backup."""

KEPT = 2
"""Checkpoints of an attempt that stay in the backup."""

RETRY_SECONDS = (1.0, 60.0)
"""Between two tries, at first and at most."""

END_SECONDS = 60.0
"""How long the end of an attempt waits for its last backup."""

T = TypeVar("T")


class Unreachable(RuntimeError):  # noqa: N818 - it is what happened
    """The storage failed, or what is in it is not this run's to write."""


class Damaged(Exception):  # noqa: N818 - it is what happened
    """A file of a backup is missing or not as it was written; holds its name and what is wrong."""


class StorePosition(msgspec.Struct, frozen=True):
    """How far a store is."""

    position: dict[str, int]
    """The last row of each table that only grows."""
    last_event: tuple[int, float]
    """Number and time."""
    published: int
    pruned_before: int


class StoredFile(msgspec.Struct, frozen=True):
    """A file in the storage: its name there, and the digest of what it holds."""

    name: str
    digest: str


class Backup(msgspec.Struct, frozen=True):
    """All that a run is rebuilt from. Files may be of earlier backups and attempts."""

    state: StorePosition
    version: int
    """Of the checkpoint."""
    files: dict[str, StoredFile]
    """By their places in the run directory."""
    rows: list[StoredFile]
    """In the order in which they are put into an empty store."""
    run_dir: str


class Beginning(msgspec.Struct, frozen=True):
    """An attempt that writes to a directory of its own."""

    run: str
    schema: int
    layout: int = 1


class Copied(msgspec.Struct):
    """How much of a run is in its backup: up to the event of this number, at this time."""

    url: str
    event: int = 0
    time: float = 0.0
    problem: str | None = None


def copied(run_dir: Path) -> Copied | None:
    """What is known of the backup of the run in `run_dir`; None: it has none."""
    try:
        return msgspec.json.decode((run_dir / STATE).read_bytes(), type=Copied)
    except (FileNotFoundError, DecodeError):
        return None


class Storage:
    """Files below `url`, a path or what fsspec takes for one. Raises `Unreachable`."""

    def __init__(self, url: str) -> None:
        """Raise `UserError` if there is no such kind of storage."""
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        self.url = url
        try:
            self._fs, root = url_to_fs(url, use_listings_cache=False)
        except ImportError as error:  # it names the package
            raise UserError(f"run.backup: {url}: {error}") from None
        except (ValueError, TypeError) as error:
            known = "such as: file, s3, gs, abfs, hdfs, sftp"
            raise UserError(f"run.backup: {url}: {error} ({known})") from None
        self._root = root.rstrip("/")

    def put(self, name: str, source: Path) -> StoredFile:
        """Write a copy of a file."""
        with self._explained("write", name) as path:
            size, found = source.stat().st_size, digest(source)
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(source), path)
            if (written := self._fs.size(path)) != size:
                raise OSError(f"{written} of {size} bytes were written")
            return StoredFile(name, found)

    def get(self, name: str, kind: type[T]) -> T | None:
        """What a file of JSON says; None: it is missing or not whole."""
        with self._explained("read", name) as path, suppress(FileNotFoundError, DecodeError):
            return msgspec.json.decode(self._fs.cat_file(path), type=kind)
        return None

    def get_file(self, stored: StoredFile, target: Path) -> None:
        """Copy a file from there to the disk. Raises `Damaged`."""
        target.parent.mkdir(parents=True, exist_ok=True)
        found = None
        with self._explained("read", stored.name) as path, suppress(FileNotFoundError):
            self._fs.get_file(path, str(target))
            found = digest(target)
        if found != stored.digest:
            raise Damaged(stored.name, "is cut short or changed" if found else "is missing")
        flush(target)

    def names(self, directory: str) -> list[str]:
        """What is directly in a directory, if there is one."""
        with self._explained("list", directory) as path, suppress(FileNotFoundError):
            found = self._fs.ls(path, detail=False)
            return sorted(each.rstrip("/").rpartition("/")[2] for each in found)
        return []

    def remove(self, name: str) -> None:
        """Delete a directory."""
        with self._explained("delete", name) as path:
            self._fs.rm(path, recursive=True)

    @contextmanager
    def _explained(self, what: str, name: str) -> Iterator[str]:
        try:
            yield f"{self._root}/{name}".rstrip("/")
        except Exception as error:  # each kind of storage has its own
            said = " ".join(str(error).split()) or type(error).__name__
            raise Unreachable(f"cannot {what} {name or self.url}: {said[:200]}") from error

    def attempts(self) -> dict[str, Beginning]:
        """Those that began to write here, oldest first."""
        found = {name: self.began(name) for name in self.names("")}
        return {name: each for name, each in found.items() if each is not None}

    def began(self, attempt: str) -> Beginning | None:
        """What an attempt says of itself, if it is one."""
        return self.get(f"{attempt}/beginning.json", Beginning)

    def backups(self, attempts: Iterable[str]) -> Iterator[tuple[str, Backup | None]]:
        """Those of these attempts, each with its directory, newest first; None: not complete."""
        for attempt in sorted(attempts, reverse=True):
            for number in sorted(filter(str.isdigit, self.names(attempt)), reverse=True):
                name = f"{attempt}/{number}"
                yield name, self.get(f"{name}/backup.json", Backup)


def digest(path: Path) -> str:
    """32 hexadecimal digits that say whether files are the same."""
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(2**22):
            found.update(chunk)
    return found.hexdigest()


def check_free(url: str | None) -> None:
    """Raise `UserError` if a new run cannot have its backup there: another has. Storage that cannot
    be reached passes: it is tried again while the run goes on."""
    if url is None:
        return
    storage, there = Storage(url), dict[str, Beginning]()
    with suppress(Unreachable):
        there = storage.attempts()
    if there:
        raise UserError(
            f"run.backup: {url} holds a run already; `{to_resume(url)}` goes on with it, or name "
            "another place"
        )


# -- rows ------------------------------------------------------------------------------------------

GROWING = {"events": "seq", "commands": "seq", "changes": "seq", "segments": "rowid",
           "snapshots": "event"}  # fmt: skip
"""Tables of which old rows never change, and the column that says what is new."""
_ATTEMPTS = "SELECT started, config FROM attempts ORDER BY attempt"
_LAST_EVENT = "SELECT seq, time FROM events ORDER BY seq DESC LIMIT 1"
_PRUNED_BEFORE = "SELECT value FROM meta WHERE key = 'pruned_before'"


def state_of(connection: sqlite3.Connection) -> StorePosition:
    """How far a store is."""
    position = {}
    for table, column in GROWING.items():
        newest = f"SELECT COALESCE(MAX({column}), 0) FROM {table}"
        (position[table],) = connection.execute(newest).fetchone()
    last_event = connection.execute(_LAST_EVENT).fetchone() or (0, 0.0)
    found = [connection.execute(query).fetchone() for query in (PUBLISHED, _PRUNED_BEFORE)]
    return StorePosition(position, last_event, *(row[0] if row else 0 for row in found))


def read_rows(connection: sqlite3.Connection, target: Path, since: dict[str, int]) -> StorePosition:
    """Write what is new after a position to the file `target`, in one read transaction.

    Of tables that grow, the new rows; of the others those that `changes` names, as they are now. So
    it costs by what came between two states of the store, and is right after deletions.
    """
    ask = connection.execute
    ask(f"ATTACH '{target.resolve().as_uri()}?mode=rwc' AS part")
    try:
        ask("PRAGMA part.journal_mode = OFF")
        ask("PRAGMA part.synchronous = OFF")
        ask("BEGIN")
        state = state_of(connection)
        chosen = {
            table: f"main.{table} t WHERE t.{column} > {since.get(table, 0)}"
            for table, column in GROWING.items()
        }
        chosen["snapshots"] += " ORDER BY event DESC LIMIT 1"
        chosen["meta"] = "main.meta t"
        for table, key in NOTED.items():
            names, same = "ab"[: len(key)], zip(key, "ab", strict=False)
            chosen[table] = (
                f"(SELECT DISTINCT {', '.join(names)} FROM part.changes WHERE what = '{table}') n "
                f"CROSS JOIN main.{table} t ON "
                + " AND ".join(f"t.{column} = n.{name}" for column, name in same)
            )
        for table, rows in chosen.items():
            number = "t.rowid, " if table == "segments" else ""  # others follow its numbers
            ask(f"CREATE TABLE part.{table} AS SELECT {number}t.* FROM {rows}")
        ask("COMMIT")
    finally:
        if connection.in_transaction:
            ask("ROLLBACK")
        ask("DETACH part")
    return state


def apply_rows(connection: sqlite3.Connection, part: Path) -> None:
    """Put what `read_rows` wrote into a store that has all before."""
    ask = connection.execute
    ask(f"ATTACH '{part.resolve().as_uri()}' AS part")
    ask("BEGIN")
    gone = "group_id IN (SELECT a FROM part.changes WHERE what = 'pruned')"
    ask(f"DELETE FROM main.segments WHERE {gone}")
    ask(f"DELETE FROM main.token_details WHERE {gone}")
    ask(f"UPDATE main.trajectories SET text = NULL WHERE {gone}")
    for table, key in NOTED.items():
        changed = f"SELECT {', '.join('ab'[: len(key)])} FROM part.changes WHERE what = '{table}'"
        ask(f"DELETE FROM main.{table} WHERE ({', '.join(key)}) IN ({changed})")
    for table in (*GROWING, *NOTED, "meta"):
        names = ", ".join(f'"{row[1]}"' for row in ask(f"PRAGMA part.table_info({table})"))
        ask(f"INSERT OR REPLACE INTO main.{table} ({names}) SELECT {names} FROM part.{table}")
    newest = "SELECT event FROM main.snapshots ORDER BY event DESC LIMIT 2"
    ask(f"DELETE FROM main.snapshots WHERE event NOT IN ({newest})")
    ask("COMMIT")
    ask("DETACH part")


# -- making it -------------------------------------------------------------------------------------


class BackupThread:
    """Makes the backups of one attempt at the run in `run_dir`, and tries again what failed. The
    run waits for it only at its end, for `END_SECONDS` at most."""

    def __init__(self, run_dir: Path, url: str) -> None:
        """Raise `UserError` if there is no such kind of storage."""
        self._run_dir, self._held, self._storage = run_dir, run_dir / HELD, Storage(url)
        self._thread = threading.Thread(target=self._serve, name="backup", daemon=True)
        self._due, self._ends_at = threading.Event(), float("inf")
        self._made_at = time.monotonic()
        self._problem: str | None = None
        self._said: str | None = None
        self._defect: BaseException | None = None
        self._attempt, self._number = "", 0
        self._last: Backup | None = None
        self._there: dict[str, StoredFile] = {}
        """Files that are copied already, by their places in the run directory."""

    def start(self) -> None:
        """Begin: the store is there."""
        self._made_at = time.monotonic()
        self._due.set()
        self._thread.start()

    def saved(self) -> None:
        """A checkpoint is complete."""
        self._due.set()

    @property
    def behind(self) -> float:
        """Seconds of the run that would be lost."""
        return time.monotonic() - self._made_at

    def notice(self) -> str | None:
        """What the user should know now and was not told, in a line. Raises what a defect raised in
        the thread."""
        if self._defect is not None:
            defect, self._defect = self._defect, None
            raise defect
        state = self._problem
        if (state is None) == (self._said is None):
            return None
        self._said = state
        if state is None:
            return f"backup {self._storage.url}: is up to date again"
        return f"backup {self._storage.url}: {state}; the run goes on, and it is tried again"

    def close(self) -> None:
        """Make the last backup, if that does not take long."""
        if self._thread.is_alive():
            self._ends_at = time.monotonic() + END_SECONDS
            self._due.set()
            self._thread.join(END_SECONDS + 1.0)
        if self._defect is not None:
            raise self._defect

    def _serve(self) -> None:
        try:
            with closing(schema.open_for_reading(self._run_dir / EVENTS)) as connection:
                self._make_each(connection)
        except BaseException as error:  # noqa: BLE001 - the controller's thread raises it
            self._defect = error
        finally:
            shutil.rmtree(self._held, ignore_errors=True)

    def _make_each(self, connection: sqlite3.Connection) -> None:
        wait: float | None = None
        while True:
            self._due.wait(wait)
            self._due.clear()
            is_last = self._ends_at < float("inf")
            try:
                is_made = self._make(connection, is_last=is_last)
            except (Unreachable, OSError, sqlite3.DatabaseError) as error:
                first, most = (0.1, 1.0) if is_last else RETRY_SECONDS
                wait, is_made = min(max(2 * (wait or 0.0), first), most), False
                self._problem = " ".join(str(error).split())
                self._write_state()
            else:
                wait, self._problem = None if is_made else 0.1, None
            if is_last and (is_made or time.monotonic() > self._ends_at):
                return

    def _write_state(self) -> None:
        if self._run_dir.is_dir():
            event = self._last.state.last_event if self._last else (0, 0.0)
            state = Copied(self._storage.url, *event, self._problem)
            disk.replace(self._run_dir / STATE, msgspec.json.encode(state))

    def _begin(self, connection: sqlite3.Connection) -> None:
        """Claim a directory, the first time that the storage can be reached."""
        started, config = connection.execute(_ATTEMPTS).fetchone()
        run = f"{started}, seed {msgspec.json.decode(config)['run']['seed']}"
        known = self._storage.attempts()
        if others := [name for name, each in known.items() if each.run != run]:
            raise Unreachable(f"it holds another run ({others[0]}); name another place")
        for _, backup in self._storage.backups(known):
            if backup is not None and _continues(connection, backup.state):
                self._last, self._there = backup, dict(backup.files)
                break
        name = f"{int(max(known, default='000000')[:6]) + 1:06d}-{uuid.uuid4().hex[:12]}"
        self._put(f"{name}/beginning.json", Beginning(run, SCHEMA_VERSION, LAYOUT))
        self._attempt = name

    def _make(self, connection: sqlite3.Connection, *, is_last: bool) -> bool:
        """Copy the newest checkpoint and what is new; whether nothing is left to be copied."""
        shutil.rmtree(self._held, ignore_errors=True)
        self._held.mkdir()
        if not self._attempt:
            self._begin(connection)
        self._check_place()
        ((published,),) = connection.execute(PUBLISHED).fetchall() or [(0,)]
        every = checkpoints_up_to(self._run_dir / CHECKPOINTS, sys.maxsize)
        version = max((each for each in every if each <= published), default=None)
        is_newest = is_last or version == max(every, default=None)  # or its event is not stored yet
        last = self._last
        if version is None or (not is_last and last is not None and version == last.version):
            return is_newest
        began, files = time.monotonic(), self._held / "files"
        checkpoint = f"{CHECKPOINTS}/{every[version].name}"
        # Links hold the checkpoint while it is copied. The store is read once it is held and before
        # it is copied: the tokens that it goes on from are not deleted yet.
        try:
            shutil.copytree(every[version], files / checkpoint, copy_function=os.link)
            if (inputs := self._run_dir / "inputs").is_dir():
                shutil.copytree(inputs, files / inputs.name, copy_function=os.link)
        except OSError:
            if every[version].is_dir():
                raise
            return False  # a newer one is complete
        state = read_rows(connection, self._held / "rows.db", last.state.position if last else {})
        if state.pruned_before > version:
            return False
        if last and (last.version, last.state.position) == (version, state.position):
            return True
        for name in FILES:  # after the rows: a step's metrics are written before its event
            if (self._run_dir / name).is_file():
                shutil.copyfile(self._run_dir / name, files / name)
        self._copy(state, version)
        self._made_at = began
        return is_newest

    def _check_place(self) -> None:
        names = self._storage.names("")
        if self._attempt not in names:
            raise Unreachable(f"{self._attempt} is not there any more")
        if later := [name for name in names if name > self._attempt and self._storage.began(name)]:
            raise Unreachable(f"{later[-1]} goes on with this run, which is copied no further")

    def _put(self, name: str, value: msgspec.Struct) -> None:
        """Write a file of JSON."""
        file = self._held / "value.json"
        file.write_bytes(msgspec.json.encode(value))
        self._storage.put(name, file)

    def _copy(self, state: StorePosition, version: int) -> None:
        """Copy what is held, and then say that all is there."""
        own, number, last = self._attempt, self._number + 1, self._last
        place, held, files = f"{own}/{number:08d}", self._held / "files", dict[str, StoredFile]()
        new = self._storage.put(f"{own}/rows/{number:08d}.db", self._held / "rows.db")
        for path in filter(Path.is_file, sorted(held.rglob("*"))):
            name = path.relative_to(held).as_posix()
            if name in FILES or name not in self._there:
                folder = own if name.startswith("inputs/") else place
                self._there[name] = self._storage.put(f"{folder}/{name}", path)
            files[name] = self._there[name]
        rows, where = [*(last.rows if last else []), new], str(self._run_dir.resolve())
        made = Backup(state, version, files, rows, where)
        self._put(f"{place}/backup.json", made)
        self._last, self._there, self._number, self._problem = made, files, number, None
        if last is None or last.version != version:  # else its checkpoint is in an earlier one
            for old in filter(str.isdigit, self._storage.names(own)):
                if int(old) <= number - KEPT:
                    self._storage.remove(f"{own}/{old}")
        self._write_state()


def _continues(connection: sqlite3.Connection, state: StorePosition) -> bool:
    """Whether a store has all that it had in this state: not if its end was lost with the power."""
    number, when = state.last_event
    found = connection.execute("SELECT time FROM events WHERE seq = ?", (number,)).fetchone()
    position = state_of(connection).position
    return found == (when,) and all(position[t] >= last for t, last in state.position.items())


# -- rebuilding the run ----------------------------------------------------------------------------


def restore(url: str, run_dir: Path | None = None) -> tuple[Path, list[str]]:
    """Rebuild the run in `run_dir`, by default where it was, from the newest backup that is whole;
    return the directory, and what the user should know, in lines.

    Raises:
        UserError: there is no run, it cannot be read, or nothing of it is whole.
    """
    storage, said, damaged = Storage(url), list[str](), set[str]()
    try:
        known = storage.attempts()
        if not known:
            raise UserError(f"{url}: is no backup of a run")
        newest = known[max(known)]
        if (newest.schema, newest.layout) != (SCHEMA_VERSION, LAYOUT):
            raise UserError(
                f"{url}: is of schema version {newest.schema}, layout {newest.layout}, and this "
                f"Rhymeflow reads {SCHEMA_VERSION}, layout {LAYOUT}"
            )
        for name, backup in storage.backups(known):
            if backup is None:
                said.append(f"{name} is not complete: it is left out")
                continue
            if any(file.name in damaged for file in (*backup.files.values(), *backup.rows)):
                continue
            target = run_dir or Path(backup.run_dir)
            try:
                _rebuild(storage, backup, target)
            except Damaged as error:
                damaged.add(error.args[0])
                said.append(f"{' '.join(error.args)}: what needs it is left out")
                continue
            told = f"{url}: the log until event {backup.state.last_event[0]:,}"
            return target, [f"{told}, version {backup.state.published}", *said]
    except Unreachable as error:
        raise UserError(f"{url}: {error}") from None
    raise UserError(f"{url}: nothing in it is whole: {'; '.join(said) or 'it was never complete'}")


def _rebuild(storage: Storage, backup: Backup, run_dir: Path) -> None:
    """Make the run directory. Raises `Damaged`."""
    if run_dir.exists() and any(run_dir.iterdir()):
        raise UserError(f"--output_dir {run_dir}: is not empty; name a new directory")
    unfinished = run_dir.with_name(f"{run_dir.name}.from-backup-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        for place, file in backup.files.items():
            storage.get_file(file, unfinished / place)
        _rebuild_store(storage, backup.rows, unfinished)
        run_dir.mkdir(exist_ok=True)
        unfinished.replace(run_dir)
    except OSError as error:
        raise UserError(f"--output_dir {run_dir}: cannot be made: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _rebuild_store(storage: Storage, rows: Iterable[StoredFile], folder: Path) -> None:
    part = folder / "part.db"
    with closing(sqlite3.connect(folder / EVENTS, isolation_level=None, uri=True)) as connection:
        schema.create(connection)
        connection.execute("PRAGMA journal_mode = OFF")  # it is thrown away if it fails
        connection.execute("PRAGMA synchronous = OFF")
        for file in rows:
            storage.get_file(file, part)
            apply_rows(connection, part)
            part.unlink()
        connection.execute("PRAGMA journal_mode = WAL")
    flush(folder / EVENTS)
