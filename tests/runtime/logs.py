"""What the log of a run says, and whether the laws hold of it."""

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from rhymeflow.config import Config
from rhymeflow.observe.summary import Summary
from rhymeflow.runtime.controller import Controller
from rhymeflow.runtime.replay import replay
from rhymeflow.runtime.train import train as run
from rhymeflow.store.reader import TrajectoryReader
from tests.fake_run.check import WithoutSnapshots

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


def check_replay(config: Config) -> None:
    """A replay of the log from its beginning gives the commands that it has, and no others."""
    path = Path(config.run.output_dir) / "events.db"
    with closing(WithoutSnapshots(path)) as log:
        past = replay(log, path)
    assert (past.unrecorded, past.notes) == ((), ())


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
