"""`rhymeflow runs`: the runs below directories, a line each.

Holds true: reads run directories and writes nothing, also while runs go on; a run that cannot be
read is listed with what is wrong with it, and does not hide the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rhymeflow.config.run import RUNS
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from rhymeflow.observe.printable import printable
from rhymeflow.observe.progress import clock
from rhymeflow.observe.summary import FILE as SUMMARY
from rhymeflow.observe.trajectory import number
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import EVENTS
from rhymeflow.store.writing import is_written
from rhymeflow.suites.metrics import REWARD

State = Literal["running", "ended", "stopped", "killed"]
"""`running`: its controller lives. `ended`: it did all its steps. `stopped`: its controller ended
it before that, upon Ctrl-C or an error. `killed`: its controller was gone before it could."""

_DEEPEST = 3
"""Levels of directories below those that are given."""

_LAST_EVENT = "SELECT time FROM events ORDER BY seq DESC LIMIT 1"
LAST_COMMAND = "SELECT kind FROM commands ORDER BY seq DESC LIMIT 1"
"""`Finish`, if the run did all its steps."""
_TRAINED = "SELECT COUNT(*) FROM trajectories WHERE trained IS NOT NULL"


@dataclass(frozen=True)
class Run:
    """A run in a line; `None` is what it never came to."""

    path: Path
    recipe: str
    """The name in its configuration."""
    schedule: str
    state: State
    steps: int
    """Steps whose metrics are there."""
    max_steps: int | None
    eval_reward_first: float | None
    """Mean held-out reward when it was first measured, before training as a rule."""
    eval_reward_best: float | None
    trajectories: int
    """Responses that were trained on."""
    trajectories_per_s: float | None
    """The same by the second of the run."""
    seconds: float
    """From its beginning to its last event, without the time between attempts."""
    started: str
    """Date and time (UTC) at which its first attempt began."""


@dataclass(frozen=True)
class Unreadable:
    """A directory with the log of a run that cannot be read."""

    path: Path
    problem: str


def find(directories: Sequence[Path]) -> list[Path]:
    """Return the run directories among and below these, each once.

    Raises:
        UserError: one is not there, or holds no run.
    """
    found: dict[Path, None] = {}
    for directory in directories:
        if not directory.is_dir():
            raise UserError(f"{directory}: no such directory")
        runs = list(_below(directory, _DEEPEST))
        if not runs:
            raise UserError(f"{directory}: holds no run, at most {_DEEPEST} directories deep")
        found |= dict.fromkeys(runs)
    return list(found)


def _below(directory: Path, levels: int) -> Iterator[Path]:
    if (directory / EVENTS).is_file():
        yield directory
    elif levels:
        for each in sorted(directory.iterdir()):
            if each.is_dir() and not each.name.startswith("."):
                yield from _below(each, levels - 1)


def read(path: Path) -> Run:
    """Return what there is to say of the run in `path`.

    Raises:
        UserError: it cannot be read.
    """
    with open_undamaged(path / EVENTS) as reader:
        attempts = reader.attempts()
        if not attempts:
            raise UserError(f"{path}: the run has not begun")
        config = json.loads(attempts[-1].config)
        last = reader.query(_LAST_EVENT)
        seconds = last[0][0] if last else 0.0
        summary = current_summary(path, seconds)
        state = _state(path, reader, is_summarized=summary is not None)
        trained = summary["trajectories"] if summary else reader.query(_TRAINED)[0][0]
    rows = metrics.read(path)
    rewards = [row[REWARD] for row in rows.values() if row.get(REWARD) is not None]
    return Run(
        path=path,
        recipe=config.get("name", "run"),
        schedule=config.get("schedule", {}).get("name", ""),
        state=state,
        steps=max(rows, default=0),
        max_steps=config.get("learner", {}).get("max_steps"),
        eval_reward_first=rewards[0] if rewards else None,
        eval_reward_best=max(rewards, default=None),
        trajectories=trained,
        trajectories_per_s=trained / seconds if trained and seconds else None,
        seconds=seconds,
        started=attempts[0].started,
    )


def current_summary(path: Path, seconds: float) -> dict[str, Any] | None:
    """Return `summary.json` if the run had come to its last event, at `seconds`, when it was
    written. One that was resumed has that of its attempt before until it ends."""
    file = path / SUMMARY
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file}: is not JSON: {error}") from None
    return found if found["seconds"] >= round(seconds, 3) else None


def state_of(path: Path, reader: TrajectoryReader) -> State:
    """What has become of the run in `path`, whose store is open."""
    last = reader.query(_LAST_EVENT)
    summary = current_summary(path, last[0][0] if last else 0.0)
    return _state(path, reader, is_summarized=summary is not None)


def _state(path: Path, reader: TrajectoryReader, *, is_summarized: bool) -> State:
    if is_written(path):
        return "running"
    if reader.query(LAST_COMMAND) == [("Finish",)]:
        return "ended"
    return "stopped" if is_summarized else "killed"


# -- shown -----------------------------------------------------------------------------------------


def show(directories: Sequence[Path], console: Console) -> None:
    """Print a table of the runs below these directories, the newest last; none given: `runs`."""
    runs, unreadable = _read_all(directories)
    if runs:
        console.print(_table(runs))
    for each in unreadable:
        console.print(Text(printable(f"{each.path}: {each.problem}")), soft_wrap=True)


def as_json(directories: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the same as JSON's values: an object a run, or `path` and `problem`."""
    runs, unreadable = _read_all(directories)
    return [plain(run) for run in runs] + [
        {"path": str(each.path), "problem": each.problem} for each in unreadable
    ]


def plain(run: Run) -> dict[str, Any]:
    """Return the run as JSON's values."""
    return vars(run) | {"path": str(run.path)}


def _read_all(directories: Iterable[Path]) -> tuple[list[Run], list[Unreadable]]:
    runs: list[Run] = []
    unreadable: list[Unreadable] = []
    for path in find(list(directories) or [RUNS]):
        try:
            runs.append(read(path))
        except UserError as error:
            unreadable.append(Unreadable(path, str(error).removeprefix(f"{path}: ")))
    runs.sort(key=lambda run: (run.started, str(run.path)))
    return runs, unreadable


def _table(runs: Sequence[Run]) -> Table:
    above = Path(os.path.commonpath([run.path.absolute().parent for run in runs]))
    # Names that fit, and the way to them once.
    shortest = min(os.path.relpath(above), str(above), key=len)
    title = None if shortest == "." else f"in {shortest}"
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.add_column("run", overflow="fold")
    for heading in ("recipe", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("steps", "held-out\nfirst", "\nbest", "trained\n/s", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("began\n(UTC)", no_wrap=True)
    for run in runs:
        table.add_row(
            Text(printable(str(run.path.absolute().relative_to(above)))),
            Text(printable(run.recipe)),
            run.state,
            steps_of(run),
            number(run.eval_reward_first, ".3f"),
            number(run.eval_reward_best, ".3f"),
            number(run.trajectories_per_s, ".1f"),
            clock(run.seconds),
            began(run)[len("2026-") :],
        )
    return table


def steps_of(run: Run) -> str:
    """How many of how many."""
    is_all = run.max_steps is None or run.steps == run.max_steps
    return f"{run.steps}" if is_all else f"{run.steps}/{run.max_steps}"


def began(run: Run) -> str:
    """When it began, to the minute."""
    return run.started.replace("T", " ")[:16]


__all__ = [
    "LAST_COMMAND",
    "Run",
    "State",
    "as_json",
    "current_summary",
    "find",
    "plain",
    "read",
    "show",
    "state_of",
]
