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
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rhymeflow.config.run import RUNS
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics, query
from rhymeflow.observe.printable import clock, number, printable, table
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.schema import EVENTS
from rhymeflow.suites.metrics import REWARD

_DEEPEST = 3
"""Levels of directories below those that are given."""

_TRAINED = "SELECT COUNT(*) FROM trajectories WHERE trained IS NOT NULL"


@dataclass(frozen=True)
class Run:
    """A run in a line; `None` is what it never came to."""

    path: Path
    recipe: str
    """The name in its configuration."""
    schedule: str
    state: query.State
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
        seconds = query.seconds(reader)
        summary = query.current_summary(path, seconds)
        state = query.state_of(path, reader)
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
    return [vars(run) | {"path": str(run.path)} for run in runs] + [
        {"path": str(each.path), "problem": each.problem} for each in unreadable
    ]


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
    headings = (
        "run",
        "recipe",
        "state",
        "steps",
        "held-out\nfirst",
        "\nbest",
        "trained\n/s",
        "time",
    )
    rows = [
        [
            str(run.path.absolute().relative_to(above)),
            run.recipe,
            run.state,
            _steps(run),
            number(run.eval_reward_first, ".3f"),
            number(run.eval_reward_best, ".3f"),
            number(run.trajectories_per_s, ".1f"),
            clock(run.seconds),
            run.started.replace("T", " ")[len("2026-") : len("2026-11-22 10:20")],
        ]
        for run in runs
    ]
    return table(title or "", (*headings, "began\n(UTC)"), rows)


def _steps(run: Run) -> str:
    """How many of how many."""
    is_all = run.max_steps is None or run.steps == run.max_steps
    return f"{run.steps}" if is_all else f"{run.steps}/{run.max_steps}"
