"""Rebuilds a run directory from a mirror, so that the run can be resumed where that is.

Holds true: what is rebuilt is the store at a state that it had, with a checkpoint from which its
tokens go on; nothing that is cut short, changed or missing is taken for whole, and what was left
out because of that is said. A directory of the final name is complete. Changes nothing in the
mirror.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import msgspec

from rhymeflow.config.load import config_from_json, dump_config
from rhymeflow.errors import UserError
from rhymeflow.mirror import lineage as lineages
from rhymeflow.mirror.lineage import Link
from rhymeflow.mirror.objects import (
    Beginning,
    Damaged,
    LogObject,
    TokensObject,
    Tree,
    digest,
    unpack,
)
from rhymeflow.mirror.remote import Remote, Unreachable
from rhymeflow.mirror.rows import apply, groups_in, pruned_in
from rhymeflow.mirror.shipper import FILES
from rhymeflow.mirror.trees import file_digest, version_of
from rhymeflow.store import mirrored, schema
from rhymeflow.store.mirrored import Mirrored
from rhymeflow.store.schema import EVENTS
from rhymeflow.utils.disk import flush

UNFINISHED = ".from-mirror"


class _Object(NamedTuple):
    """An object of the log, as far as it need not be read again."""

    lineage: str
    number: int
    log: LogObject
    """Without its rows."""
    groups: set[int]
    """That it has tokens of."""
    pruned: set[int]
    """That have no tokens any more."""


def restore(url: str, run_dir: Path) -> list[str]:
    """Make `run_dir` of the mirror at `url`; return what the user should know, in lines.

    Raises:
        UserError: there is no run, it cannot be read, or nothing of it is whole.
    """
    if run_dir.exists() and any(run_dir.iterdir()):
        raise UserError(f"--output_dir {run_dir}: is not empty; name a new directory")
    unfinished = run_dir.with_name(f"{run_dir.name}{UNFINISHED}-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)  # so it is nobody else's
        try:
            said = _Restoring(Remote(url), unfinished).run()
            run_dir.mkdir(exist_ok=True)
            unfinished.replace(run_dir)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except Unreachable as error:
        raise UserError(f"{url}: {error}") from None
    except OSError as error:
        raise UserError(f"--output_dir {run_dir}: cannot be made: {error}") from error
    return said


class _Restoring:
    """What is known of the mirror, and what is made of it in `directory`."""

    def __init__(self, remote: Remote, directory: Path) -> None:
        self._remote, self._directory = remote, directory
        self._said: list[str] = []

    def run(self) -> list[str]:
        known = lineages.read_all(self._remote)
        if not known:
            raise UserError(f"{self._remote.url}: is no mirror of a run")
        objects = self._objects(known)
        while True:
            objects = self._up_to_whole(objects)
            if not objects:
                raise UserError(f"{self._remote.url}: nothing in it is whole: {self._reasons()}")
            damaged = self._write_store(objects)
            if damaged is None:
                break
            objects = objects[:damaged]
        last = objects[-1]
        self._write_trees(last.log)
        self._write_files(last.lineage)
        self._note(known, last)
        told = f"{self._remote.url}: the log until event {last.log.position.events:,}"
        return [f"{told}, version {last.log.published}", *self._said]

    def _reasons(self) -> str:
        return "; ".join(self._said) or "it was never complete"

    # -- what there is -------------------------------------------------------------------------

    def _objects(self, known: dict[str, Beginning]) -> list[_Object]:
        """All objects that can be read, of the newest lineage that has a whole one."""
        while known:
            head = lineages.newest(known, self._remote.url)
            if known[head].schema != schema.SCHEMA_VERSION:
                raise UserError(
                    f"{self._remote.url}: is of schema version {known[head].schema}, and this "
                    f"Rhymeflow reads {schema.SCHEMA_VERSION}"
                )
            said, self._said = self._said, []
            found = list(self._readable(lineages.chain(known, head)))
            if any(item.log.is_whole for item in found):
                return found
            self._said = said + self._said
            del known[head]
        return []

    def _readable(self, links: list[Link]) -> Iterator[_Object]:
        """Objects in order, up to the first one that is missing or damaged."""
        for link in links:
            names = self._remote.names(f"{link.name}/log")
            there = {int(name) for name in names if name.isdigit()}
            last = max(there, default=0) if link.last is None else link.last
            tokens = {*self._remote.names(f"{link.name}/tokens")}
            for number in range(1, last + 1):
                name = lineages.log_name(link.name, number)
                data = self._remote.get(name)
                try:
                    log = unpack(data or b"", LogObject)
                except Damaged as error:
                    what = "is missing" if data is None else str(error)
                    self._said.append(f"{name} {what}: what came from there on is left out")
                    return
                groups, pruned = groups_in(log), pruned_in(log)
                if log.tokens is None or f"{number:08d}" not in tokens:
                    log.tokens = log.tokens and ""  # it had some
                log.rows, log.gone = {}, []
                yield _Object(link.name, number, log, groups, pruned)

    def _up_to_whole(self, objects: list[_Object]) -> list[_Object]:
        """Objects up to the last one from which a run can be resumed."""
        while objects:
            pruned = set().union(*(item.pruned for item in objects))
            missing = [
                index
                for index, item in enumerate(objects)
                if item.log.tokens == "" and item.groups - pruned
            ]
            if missing:
                lost = objects[missing[0]]
                name = lineages.tokens_name(lost.lineage, lost.number)
                self._said.append(f"{name} is missing: what came from there on is left out")
                objects = objects[: missing[0]]
            elif not objects[-1].log.is_whole or not self._goes_on(objects[-1].log):
                objects = objects[:-1]
            else:
                return objects
        return []

    def _goes_on(self, log: LogObject) -> bool:
        """Whether there is a checkpoint from which the tokens of this log go on."""
        if not log.pruned_before:
            return True
        versions = {path: version_of(path) or -1 for path in log.trees}
        return any(
            log.pruned_before <= version <= log.published and self._is_there(log.trees[path])
            for path, version in versions.items()
        )

    def _is_there(self, tree: Tree) -> bool:
        return all(
            name.rpartition("/")[2] in self._remote.names(f"{tree.place}/{name}".rpartition("/")[0])
            for name in tree.files
        )

    # -- what is made of it --------------------------------------------------------------------

    def _write_store(self, objects: list[_Object]) -> int | None:
        """Put all into a new store; the first that is damaged, if one is."""
        path = self._directory / EVENTS
        path.unlink(missing_ok=True)
        pruned = set().union(*(item.pruned for item in objects))
        schema.create(path)
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = OFF")  # it is thrown away if it fails
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("BEGIN")
            for index, item in enumerate(objects):
                try:
                    log, tokens = self._read(item, pruned)
                except Damaged as error:
                    self._said.append(f"{error}: what came from there on is left out")
                    return index
                apply(connection, log, tokens, pruned)
            self._put_snapshots(connection, objects[-1].log)
            last = objects[-1].log
            meta: list[tuple[str, object]] = [("pruned_before", last.pruned_before)]
            meta += [("rows", last.digests)] if last.digests is not None else []
            connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta)
            connection.execute("COMMIT")
            connection.execute("PRAGMA journal_mode = WAL")
        flush(path)
        return None

    def _read(self, item: _Object, pruned: set[int]) -> tuple[LogObject, TokensObject | None]:
        name = lineages.log_name(item.lineage, item.number)
        try:
            log = unpack(self._remote.get(name) or b"", LogObject)
            if log.tokens is None or not item.groups - pruned:
                return log, None
            name = lineages.tokens_name(item.lineage, item.number)
            data = self._remote.get(name) or b""
            tokens = unpack(data, TokensObject)
            if digest(data) != log.tokens:
                raise Damaged("is of another moment than the log beside it")
        except Damaged as error:
            raise Damaged(f"{name} {error}") from None
        return log, tokens

    def _put_snapshots(self, connection: sqlite3.Connection, log: LogObject) -> None:
        for event, name in log.snapshots.items():
            state = self._remote.get(name)
            if state is None or digest(state) != name.rpartition("-")[2]:
                self._said.append(f"{name} is missing or changed: more of the log is replayed")
                continue
            connection.execute("INSERT INTO snapshots VALUES (?, ?)", (event, state))

    def _write_trees(self, log: LogObject) -> None:
        """The directories, of checkpoints those that the log knows of."""
        is_needed = bool(log.pruned_before)
        for path, tree in sorted(log.trees.items()):
            version = version_of(path)
            if version is not None and version > log.published:
                continue
            problem = self._write_tree(self._directory / path, tree)
            if problem is None:
                is_needed &= version is None or version < log.pruned_before
            elif version is None:
                raise UserError(f"{self._remote.url}: {problem}")
            else:
                shutil.rmtree(self._directory / path)
                self._said.append(f"{problem}: that checkpoint is left out")
        if is_needed:
            raise UserError(
                f"{self._remote.url}: has no whole checkpoint from version {log.pruned_before} to "
                f"{log.published}, and the tokens before are deleted: {self._reasons()}"
            )

    def _write_tree(self, target: Path, tree: Tree) -> str | None:
        """Copy a directory; return what is wrong with it."""
        target.mkdir(parents=True)
        for name, (_, expected) in tree.files.items():
            file = target / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if not self._remote.get_file(f"{tree.place}/{name}", file):
                return f"{tree.place}/{name} is missing"
            if file_digest(file) != expected:
                return f"{tree.place}/{name} is cut short or changed"
            flush(file)
        return None

    def _write_files(self, lineage: str) -> None:
        for name in FILES:
            data = self._remote.get(f"{lineage}/files/{name}")
            try:
                if data is not None:
                    (self._directory / name).write_bytes(unpack(data, bytes))
            except Damaged as error:
                self._said.append(f"{lineage}/files/{name} {error}: it is left out")
        if not (self._directory / FILES[0]).exists():
            with closing(schema.open_for_reading(self._directory / EVENTS)) as connection:
                query = "SELECT config FROM attempts ORDER BY attempt DESC LIMIT 1"
                ((text,),) = connection.execute(query)
            config = config_from_json(text, where=f"{self._remote.url}: its configuration")
            (self._directory / FILES[0]).write_text(dump_config(config))

    def _note(self, known: dict[str, Beginning], last: _Object) -> None:
        """What the next attempt's mirror goes on from, if it is the same one."""
        with closing(schema.open_for_reading(self._directory / EVENTS)) as connection:
            event = connection.execute(
                "SELECT seq, time FROM events ORDER BY seq DESC LIMIT 1"
            ).fetchone()
        mirrored.write(
            self._directory,
            Mirrored(
                url=self._remote.url,
                run=known[last.lineage].run,
                lineage=last.lineage,
                number=last.number,
                position=msgspec.to_builtins(last.log.position),
                mark=event,
                whole=event,
                trees=msgspec.to_builtins(last.log.trees),
                snapshots=last.log.snapshots,
            ),
        )
