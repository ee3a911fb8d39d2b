"""A byte of a stored value that changed: what reads the log says so in a line, or does not mind."""

from __future__ import annotations

import io
import random
import runpy
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.logs.made_up import Size, build_log
from benchmarks.resume import assemble, first_command, no_writer
from rhymeflow.core.commands import Train
from rhymeflow.errors import UserError
from rhymeflow.observe import inspect, summary
from rhymeflow.observe.progress import Progress
from rhymeflow.runtime.replay import configured, replay
from rhymeflow.runtime.reporting import Reporter
from rhymeflow.store import previous_run
from rhymeflow.store.damage import check_log, explained, first_wrong, open_undamaged
from rhymeflow.store.writer import SqliteTrajectoryStore

AUDIT = Path(__file__).parents[2] / "examples" / "audit_run.py"
SMALL = {"learner.groups_per_batch": "2", "rollout.num_generations": "2"}
TRIES = 50
"""Changes, of all columns of all tables in turn."""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Some steps of a small run, killed, with a snapshot in it."""
    folder = tmp_path_factory.mktemp("log")
    build_log(folder, Size(400), SMALL)
    with closing(SqliteTrajectoryStore(folder / "events.db")) as store:
        store.put_snapshot(10, b"of another version" * 10)
        store.commit()
    return folder


def resumed(run_dir: Path) -> None:
    """What resuming reads, up to the first command."""
    path = run_dir / "events.db"
    check_log(run_dir)
    previous_run.check(str(run_dir), "resume")
    with closing(SqliteTrajectoryStore(path)) as store:
        with open_undamaged(path) as reader:
            past = replay(reader, path)
            config = previous_run.config_of(reader.attempts()[-1], path)
            for record in reader.commands():
                if isinstance(record.command, Train):
                    reader.batch(record.command.groups, record.command.members)
        configured(config, past.coordinator)
        with Progress(Console(file=io.StringIO())) as progress, explained(path):
            reporter = Reporter(config, no_writer(), progress, seconds=past.seconds)
            first_command(assemble(config, store, past, reporter))


def shown(run_dir: Path) -> None:
    console = Console(file=io.StringIO())
    for options in ({}, {"worst": 3}, {"trajectory": "1.0"}):
        inspect.inspect(run_dir, inspect.Question(**options), console)


def looked_at(run_dir: Path) -> None:
    console = Console(file=io.StringIO())
    for options in ({"step": 1}, {"group": 1}, {"best": 3}, {"trajectory": "1.0"}, {}):
        if "step" in options or "group" in options:
            inspect.inspect(run_dir, inspect.Question(**options), console)
        inspect.as_json(run_dir, inspect.Question(**options))


def audited(run_dir: Path) -> None:
    sys.argv = ["audit_run.py", str(run_dir)]
    try:
        runpy.run_path(str(AUDIT), run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            raise UserError(end.code) from None


READERS = (resumed, shown, audited, summary.summarize, looked_at)


def places(path: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(path)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return [
            (table, column)
            for (table,) in tables.fetchall()
            for _, column, *_ in connection.execute(f"PRAGMA table_info({table})")
        ]


def change(path: Path, table: str, column: str, rng: random.Random) -> str:
    """Change one bit, or leave out a byte, of one value; say what was done."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        rows = connection.execute(
            f"SELECT rowid, typeof({column}), CAST({column} AS BLOB) FROM {table}"
            f" WHERE LENGTH({column}) > 0"
        ).fetchall()
        if not rows:
            return "nothing is there"
        row, kind, value = rng.choice(rows)
        changed = bytearray(value)
        index = rng.randrange(len(changed))
        if rng.random() < 0.2 and len(changed) > 1:
            del changed[index]
        else:
            changed[index] ^= 1 << rng.randrange(8)
        connection.execute(
            f"UPDATE OR IGNORE {table} SET {column} = CAST(? AS {kind}) WHERE rowid = ?",
            (bytes(changed), row),
        )
    return f"{table}.{column} of row {row}: {value[:200]!r} is {bytes(changed[:200])!r}"


def what_is_said(read, folder: Path, what: str) -> list[str]:
    try:
        read(folder)
    except UserError as error:
        return str(error).splitlines()
    except Exception as error:
        raise AssertionError(f"{read.__name__}: {what}") from error
    return []


def test_what_a_run_wrote_passes(run_dir, tmp_path):
    assert first_wrong(run_dir / "events.db") is None
    shutil.copytree(run_dir, tmp_path / "run")
    for read in READERS:
        read(tmp_path / "run")


def test_no_changed_value_gives_a_traceback(run_dir, tmp_path):
    rng, told, whole = random.Random(0), 0, run_dir / "events.db"
    there = places(whole)
    for number in range(TRIES):
        folder = tmp_path / str(number)
        shutil.copytree(run_dir, folder)
        what = change(folder / "events.db", *there[number % len(there)], rng)
        for turn in range(2):  # two of the five: they take longest
            said = what_is_said(READERS[(number + turn) % len(READERS)], folder, what)
            told += bool(said)
            assert len(said) <= 1, what
        shutil.rmtree(folder)
    assert told > TRIES / 20


def test_a_defect_is_not_taken_for_damage(run_dir):
    with pytest.raises(ValueError, match="a defect"), explained(run_dir / "events.db"):
        raise ValueError("a defect")
