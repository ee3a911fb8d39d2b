"""What the log of a run says: commands by replay, and whether the laws hold."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from rhymeflow.config import Config
from rhymeflow.core.commands import Command
from rhymeflow.core.events import Event
from rhymeflow.observe.summary import Summary
from rhymeflow.runtime.controller import Controller
from rhymeflow.runtime.replay import configured
from rhymeflow.runtime.train import train as run
from rhymeflow.store.reader import TrajectoryReader

ROOT = Path(__file__).parents[2]


def train(config: Config, console: Console | None = None) -> Summary:
    return run(config, console=console or Console(file=io.StringIO()))


@contextmanager
def each_turn(does: Callable[[Controller], object], *, first: bool = False) -> Iterator[None]:
    """In the block this is done at the end of each turn of a controller, or before it acts."""
    turn = Controller._tick

    def tick(self: Controller) -> None:
        if first:
            does(self)
        turn(self)
        if not first:
            does(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Controller, "_tick", tick)
        yield


def reader(config: Config) -> TrajectoryReader:
    return TrajectoryReader(Path(config.run.output_dir) / "events.db")


def tokens(run_dir: Path, which: str = "group_id >= 0") -> dict[tuple[int, int], bytes]:
    """By group and member of what is trained on: all tokens, in order."""
    found: dict[tuple[int, int], bytes] = {}
    with closing(TrajectoryReader(run_dir / "events.db")) as log:
        for group, member, blob in log.query(
            f"SELECT group_id, member, tokens FROM segments WHERE {which} ORDER BY 1, 2, start"
        ):
            found[group, member] = found.get((group, member), b"") + blob
    return found


def replayed(log: TrajectoryReader) -> Iterator[tuple[int, Event, list[Command]]]:
    """Each event of the log with its number, and what a fresh coordinator commands upon it, under
    the configuration that is recorded for its attempt.
    """
    attempts = {attempt.first_event: attempt for attempt in log.attempts()}
    coordinator = None
    for seq, _, event in log.events():
        if attempt := attempts.get(seq):
            coordinator = configured(Config.model_validate_json(attempt.config), coordinator)
        yield seq, event, coordinator.handle(event)


def replay(config: Config) -> list[tuple[Event, list[Command]]]:
    """Each event of the run's log, and what a replay commands upon it."""
    with closing(reader(config)) as log:
        return [(event, commands) for _, event, commands in replayed(log)]


def check_replay(config: Config) -> None:
    """A replay of the recorded events, under the recorded configurations, gives the commands that
    are recorded beside them: each upon its event, and no others.
    """
    log = reader(config)
    recorded: dict[int, list[Command]] = {}
    numbers = [(r.seq, r.event) for r in log.commands()]
    assert [seq for seq, _ in numbers] == list(range(1, len(numbers) + 1))
    assert [event for _, event in numbers] == sorted(event for _, event in numbers)
    for _, event, command in log.commands():
        recorded.setdefault(event, []).append(command)
    for seq, event, commands in replayed(log):
        assert commands == recorded.pop(seq, []), (seq, event)
    assert not recorded, "commands upon events that are not there"
    log.close()


def audited(run_dir: Path) -> tuple[int, str]:
    """Exit code and output of the audit that users have, by a Python that has no packages."""
    command = [sys.executable, "-I", "-S", ROOT / "examples" / "audit_run.py", run_dir]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def audit(run_dir: Path) -> None:
    """The laws hold: of what was trained on the age, how groups ended, checksums."""
    code, printed = audited(run_dir)
    assert code == 0, printed
