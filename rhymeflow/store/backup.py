"""A copy of a run in other storage, made at each checkpoint, and the run rebuilt from there.

ATTEMPT/beginning.json   which run it is of, and which backup its log goes on from
ATTEMPT/checkpoints/...  checkpoints; `inputs/` are what a Trainer was given as objects
ATTEMPT/NNNNNNNN.db      what the store has got since the backup before, as tables of SQLite
ATTEMPT/NNNNNNNN.json    the marker: with it the backup is whole
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import xxhash

from rhymeflow.errors import UserError, to_resume
from rhymeflow.store import schema
from rhymeflow.store.checkpoint_dirs import CHECKPOINTS, checkpoints_up_to
from rhymeflow.store.schema import EVENTS, NOTED, PUBLISHED, SCHEMA_VERSION
from rhymeflow.utils import disk
from rhymeflow.utils.disk import flush

STATE, HELD = "backup.json", "backup-upload"
"""In the run directory: how much of the run is in its backup, and what is being copied."""

FILES = ("config.yaml", "trackers.json", "metrics.jsonl")
"""Small ones that are copied whole."""

KEPT = 2
"""Checkpoints of an attempt that stay in the backup."""

RETRY_SECONDS = (1.0, 60.0)
"""Between two tries, at first and at most."""

END_SECONDS = 60.0
"""How long the end of an attempt waits for its last backup."""

T = TypeVar("T")


class Unreachable(RuntimeError):  # noqa: N818 - it is what happened
    """The storage failed, or what is in it is not this run's to write."""


class Tree(msgspec.Struct, frozen=True):
    """A directory that was copied: its path there, and a digest of each file."""

    path: str
    files: dict[str, str]


class State(msgspec.Struct, frozen=True):
    """Of the store, at some time."""

    position: dict[str, int]
    """The last row of each table that only grows."""
    last_event: tuple[int, float]
    """Number and time."""
    published: int
    pruned_before: int


class Marker(msgspec.Struct, frozen=True):
    """A backup that is whole."""

    previous: tuple[str, int] | None
    """Attempt and number of the one before, of which the rows go on; None: it has all rows."""
    state: State
    version: int
    """Of the checkpoint."""
    trees: dict[str, Tree]
    """The checkpoint and the inputs, by where they belong in the run directory."""
    rows: str
    """Digest of the file."""
    run_dir: str


class Beginning(msgspec.Struct, frozen=True):
    """An attempt that writes to a directory of its own."""

    run: str
    schema: int
    previous: tuple[str, int] | None
    """The backup that its log goes on from."""


class Backup(NamedTuple):
    """One of those that are there."""

    attempt: str
    number: int
    marker: Marker


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
    except (FileNotFoundError, msgspec.DecodeError):
        return None


class Storage:
    """Backups below `url`, a path or what fsspec takes for one. Raises `Unreachable`."""

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

    def put(self, name: str, source: Path | msgspec.Struct) -> str:
        """Write a copy of a file, or JSON; return the file's digest."""
        with self._explained("write", name) as path:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            if isinstance(source, Path):
                size, found = source.stat().st_size, digest(source)
                self._fs.put_file(str(source), path)
            else:
                data = msgspec.json.encode(source)
                size, found = len(data), ""
                self._fs.pipe_file(path, data)
            if (written := self._fs.size(path)) != size:
                raise OSError(f"{written} of {size} bytes were written")
            return found

    def get(self, name: str, kind: type[T]) -> T | None:
        """What a file of JSON says; None: it is missing or not whole."""
        with self._explained("read", name) as path:
            try:
                return msgspec.json.decode(self._fs.cat_file(path), type=kind)
            except (FileNotFoundError, msgspec.DecodeError):
                return None

    def get_file(self, name: str, target: Path, expected: str) -> str | None:
        """Copy a file from there; return what is wrong with it."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with self._explained("read", name) as path:
            try:
                self._fs.get_file(path, str(target))
            except FileNotFoundError:
                return f"{name} is missing"
        return None if digest(target) == expected else f"{name} is cut short or changed"

    def names(self, directory: str) -> list[str]:
        """What is directly in a directory."""
        with self._explained("list", directory) as path:
            try:
                found = self._fs.ls(path, detail=False)
            except FileNotFoundError:
                return []
            return sorted(each.rstrip("/").rpartition("/")[2] for each in found)

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

    def backups(self, attempt: str, known: dict[str, Beginning], said: list[str]) -> list[Backup]:
        """The newest backup of an attempt that has all before it, and those, newest first."""
        found: list[Backup] = []
        names = (Path(name) for name in self.names(attempt))
        numbers = [int(n.stem) for n in names if n.suffix == ".json" and n.stem.isdigit()]
        at = (attempt, max(numbers)) if numbers else known[attempt].previous
        while at is not None and at[0] in known:
            (name, number) = at
            marker = self.get(f"{name}/{number:08d}.json", Marker)
            if marker is not None:
                found.append(Backup(name, number, marker))
                at = marker.previous
            else:
                said.append(f"{name}/{number:08d}.json is not whole: what follows is left out")
                found.clear()
                at = (name, number - 1) if number > 1 else known[name].previous
        return found if at is None else []


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
    storage = Storage(url)
    try:
        there = storage.attempts()
    except Unreachable:
        return
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
_LAST_EVENT = "SELECT seq, time FROM main.events ORDER BY seq DESC LIMIT 1"
_PRUNED_BEFORE = "SELECT value FROM main.meta WHERE key = 'pruned_before'"


def read_rows(connection: sqlite3.Connection, target: Path, since: dict[str, int]) -> State:
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
        position = dict(since)
        for table, column in GROWING.items():
            ((last,),) = ask(f"SELECT MAX({column}) FROM part.{table}")
            position[table] = position.get(table, 0) if last is None else last
        found = [ask(query).fetchone() or (0,) for query in (PUBLISHED, _PRUNED_BEFORE)]
        state = State(position, ask(_LAST_EVENT).fetchone() or (0, 0.0), found[0][0], found[1][0])
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


def put_files(part: Path, run_dir: Path) -> None:
    """Put files beside the rows. After the rows: a step's metrics are written before its event."""
    with closing(sqlite3.connect(part, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE files (name TEXT, data BLOB)")
        for path in (run_dir / name for name in FILES):
            if path.is_file():
                connection.execute(
                    "INSERT INTO files VALUES (?, ?)", (path.name, path.read_bytes())
                )


def get_files(part: Path, run_dir: Path) -> None:
    """Bring the files to where `put_files` found them."""
    with closing(sqlite3.connect(part)) as connection:
        for name, data in connection.execute("SELECT name, data FROM files"):
            (run_dir / name).write_bytes(data)


# -- making it -------------------------------------------------------------------------------------


class BackupThread:
    """Makes the backups of one attempt at the run in `run_dir`. The run waits for it only at its
    end, and then not for long. What fails is tried again."""

    def __init__(self, run_dir: Path, url: str) -> None:
        """Raise `UserError` if there is no such kind of storage."""
        self._run_dir, self._storage = run_dir, Storage(url)
        self._thread = threading.Thread(target=self._serve, name="backup", daemon=True)
        self._due, self._ends_at = threading.Event(), float("inf")
        self._made_at = time.monotonic()
        self._problem: str | None = None
        self._said: str | None = None
        self._defect: BaseException | None = None
        self._attempt = ""
        self._last: Backup | None = None
        self._trees: dict[str, Tree] = {}
        """What is there, by where it is in the run directory; of the newest whole backup last."""

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
        """What the user should know now and was not told, in a line."""
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
                self._go_on(connection)
        except BaseException as error:  # noqa: BLE001 - the controller's thread raises it
            self._defect = error
        finally:
            shutil.rmtree(self._run_dir / HELD, ignore_errors=True)

    def _go_on(self, connection: sqlite3.Connection) -> None:
        wait: float | None = None
        while True:
            self._due.wait(wait)
            self._due.clear()
            is_last = self._ends_at < float("inf")
            try:
                is_made = self._back_up(connection, is_last=is_last)
            except (Unreachable, OSError, sqlite3.DatabaseError) as error:
                first, most = (0.1, 1.0) if is_last else RETRY_SECONDS
                wait, is_made = min(max(2 * (wait or 0.0), first), most), False
                self._problem = " ".join(str(error).split())
                self._note()
            else:
                wait, self._problem = None if is_made else 0.1, None
            if is_last and (is_made or time.monotonic() > self._ends_at):
                return

    def _note(self) -> None:
        if self._run_dir.is_dir():
            event = self._last.marker.state.last_event if self._last else (0, 0.0)
            state = Copied(self._storage.url, *event, self._problem)
            disk.replace(self._run_dir / STATE, msgspec.json.encode(state))

    def _begin(self, connection: sqlite3.Connection) -> None:
        """Claim a directory, the first time that the storage can be reached."""
        started, config = connection.execute(_ATTEMPTS).fetchone()
        run = f"{started}, seed {msgspec.json.decode(config)['run']['seed']}"
        known = self._storage.attempts()
        if others := [name for name, each in known.items() if each.run != run]:
            raise Unreachable(f"it holds another run ({others[0]}); name another place")
        newest = max(known, default="000000")
        found = self._storage.backups(newest, known, []) if known else []
        self._last = next((each for each in found if _is_of(connection, each.marker)), None)
        if self._last is not None:
            self._trees = dict(self._last.marker.trees)
        name = f"{int(newest[:6]) + 1:06d}-{uuid.uuid4().hex[:12]}"
        beginning = Beginning(run, SCHEMA_VERSION, self._last and self._last[:2])
        self._storage.put(f"{name}/beginning.json", beginning)
        self._attempt = name

    def _back_up(self, connection: sqlite3.Connection, *, is_last: bool) -> bool:
        """Copy the newest checkpoint and what is new; whether nothing is left to be copied."""
        if not self._attempt:
            self._begin(connection)
        self._check_place()
        ((published,),) = connection.execute(PUBLISHED).fetchall() or [(0,)]
        every = checkpoints_up_to(self._run_dir / CHECKPOINTS, sys.maxsize)
        version = max((each for each in every if each <= published), default=None)
        is_newest = is_last or version == max(every, default=None)  # or its event is not stored yet
        last = self._last.marker if self._last else None
        if version is None or (not is_last and last is not None and version == last.version):
            return is_newest
        began, names = time.monotonic(), (f"{CHECKPOINTS}/{every[version].name}", "inputs")
        # Links hold the checkpoint while it is copied. The store is read once it is held and before
        # it is copied: the tokens that it goes on from are not deleted yet.
        try:
            self._hold(names)
        except OSError:
            if every[version].is_dir():
                raise
            return False  # a newer one is complete
        rows = self._run_dir / HELD / "rows.db"
        state = read_rows(connection, rows, last.state.position if last else {})
        if state.pruned_before > version:
            return False
        if last and (last.version, last.state.position) == (version, state.position):
            return True
        put_files(rows, self._run_dir)
        for name in names:
            if name not in self._trees and (self._run_dir / HELD / name).is_dir():
                self._trees = {name: self._copy(name), **self._trees}
        self._mark(state, version, names)
        self._made_at = began
        return is_newest

    def _check_place(self) -> None:
        names = self._storage.names("")
        if self._attempt not in names:
            raise Unreachable(f"{self._attempt} is not there any more")
        if later := [name for name in names if name > self._attempt and self._storage.began(name)]:
            raise Unreachable(f"{later[-1]} goes on with this run, which is copied no further")

    def _hold(self, names: Sequence[str]) -> None:
        """Link what is to be copied."""
        held = self._run_dir / HELD
        shutil.rmtree(held, ignore_errors=True)
        held.mkdir()
        for name in names:
            if name not in self._trees and (source := self._run_dir / name).is_dir():
                shutil.copytree(source, held / name, copy_function=os.link)

    def _copy(self, name: str) -> Tree:
        """Copy a directory that is held."""
        source, path, found = self._run_dir / HELD / name, f"{self._attempt}/{name}", {}
        for file in sorted(source.rglob("*")):
            if file.is_file():
                inside = file.relative_to(source).as_posix()
                found[inside] = self._storage.put(f"{path}/{inside}", file)
        return Tree(path, found)

    def _mark(self, state: State, version: int, names: Sequence[str]) -> None:
        """Copy the rows, and then say that all is there."""
        last, own = self._last, self._attempt
        number = last.number + 1 if last and last.attempt == own else 1
        rows = self._storage.put(f"{own}/{number:08d}.db", self._run_dir / HELD / "rows.db")
        trees = {name: self._trees[name] for name in names if name in self._trees}
        where = str(self._run_dir.resolve())
        marker = Marker(last and last[:2], state, version, trees, rows, where)
        self._storage.put(f"{own}/{number:08d}.json", marker)
        self._last, self._problem = Backup(own, number, marker), None
        self._note()
        self._trees |= {name: self._trees.pop(name) for name in trees}
        for old in [name for name in self._trees if name != "inputs"][:-KEPT]:
            if self._trees[old].path.startswith(own):
                self._storage.remove(self._trees[old].path)
            del self._trees[old]


def _is_of(connection: sqlite3.Connection, marker: Marker) -> bool:
    """Whether the store goes on from this backup: not if its end was lost with the power."""
    number, when = marker.state.last_event
    found = connection.execute("SELECT time FROM events WHERE seq = ?", (number,)).fetchone()
    grown = [
        connection.execute(f"SELECT COALESCE(MAX({column}), 0) FROM {table}").fetchone()[0]
        >= marker.state.position[table]
        for table, column in GROWING.items()
    ]
    return found == (when,) and all(grown)


# -- rebuilding the run ----------------------------------------------------------------------------


def restore(url: str, run_dir: Path | None = None) -> tuple[Path, list[str]]:
    """Rebuild the run in `run_dir`, by default where it was, from the newest backup that is whole;
    return the directory, and what the user should know, in lines.

    Raises:
        UserError: there is no run, it cannot be read, or nothing of it is whole.
    """
    storage, said = Storage(url), list[str]()
    try:
        known = storage.attempts()
        if not known:
            raise UserError(f"{url}: is no backup of a run")
        for attempt in sorted(known, reverse=True):
            found = storage.backups(attempt, known, said)
            if (written := known[attempt].schema) != SCHEMA_VERSION:
                reads = f"and this Rhymeflow reads {SCHEMA_VERSION}"
                raise UserError(f"{url}: is of schema version {written}, {reads}")
            while found:
                newest = found[0].marker
                target = run_dir or Path(newest.run_dir)
                problem = _rebuild(storage, found, target)
                if problem is None:
                    told = f"{url}: the log until event {newest.state.last_event[0]:,}"
                    return target, [f"{told}, version {newest.state.published}", *said]
                said.append(f"{problem}: what needs it is left out")
    except Unreachable as error:
        raise UserError(f"{url}: {error}") from None
    raise UserError(f"{url}: nothing in it is whole: {'; '.join(said) or 'it was never complete'}")


def _rebuild(storage: Storage, backups: list[Backup], run_dir: Path) -> str | None:
    """Make the run directory of these backups, newest first. If something in one is not whole,
    return that, with it and what came after it taken from the list."""
    if run_dir.exists() and any(run_dir.iterdir()):
        raise UserError(f"--output_dir {run_dir}: is not empty; name a new directory")
    unfinished = run_dir.with_name(f"{run_dir.name}.from-backup-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        for path, tree in backups[0].marker.trees.items():
            for name, expected in tree.files.items():
                file = unfinished / path / name
                if problem := storage.get_file(f"{tree.path}/{name}", file, expected):
                    del backups[0]
                    return problem
                flush(file)
        problem = _rebuild_store(storage, backups, unfinished)
        if problem is None:
            run_dir.mkdir(exist_ok=True)
            unfinished.replace(run_dir)
        return problem
    except OSError as error:
        raise UserError(f"--output_dir {run_dir}: cannot be made: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _rebuild_store(storage: Storage, backups: list[Backup], folder: Path) -> str | None:
    part = folder / "part.db"
    with closing(sqlite3.connect(folder / EVENTS, isolation_level=None, uri=True)) as connection:
        schema.create(connection)
        connection.execute("PRAGMA journal_mode = OFF")  # it is thrown away if it fails
        connection.execute("PRAGMA synchronous = OFF")
        for index in range(len(backups) - 1, -1, -1):
            attempt, number, marker = backups[index]
            if problem := storage.get_file(f"{attempt}/{number:08d}.db", part, marker.rows):
                del backups[: index + 1]
                return problem
            apply_rows(connection, part)
            get_files(part, folder)
            part.unlink()
        connection.execute("PRAGMA journal_mode = WAL")
    flush(folder / EVENTS)
    return None
