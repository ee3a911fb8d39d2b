"""`rhymeflow inspect`: what is asked of a run, shown or as JSON.

Holds true: reads the run directory and writes nothing, also while the run is going. What is asked
is one thing: the run, a step, a group, a response, or the best and worst of these.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from rhymeflow.errors import UserError
from rhymeflow.observe import colouring, group_view, overview, query, step_view, tokens
from rhymeflow.observe.learned import Kind, best_and_worst, show_best_and_worst
from rhymeflow.observe.trajectory import parse, show_trajectory
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.previous_run import store_of
from rhymeflow.store.reader import TrajectoryReader


@dataclass(frozen=True)
class Asked:
    """What of a run; the run, if nothing is given.

    Raises:
        UserError: what does not go together, or is none of what it should be.
    """

    trajectory: str | None = None
    """`group.member`: it in full, `colour`ed if that is given."""
    group: int | None = None
    best: int | None = None
    """So many responses, of one `step` if that is given."""
    worst: int | None = None
    step: int | None = None
    """By itself: the step."""
    colour: str | None = None

    def __post_init__(self) -> None:
        for name in ("best", "worst"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise UserError(f"--{name} {given}: should be 1 or more")
        kind = "best" if self.best is not None else "worst"
        things = [
            f"--{name} {given}"
            for name, given in (
                ("trajectory", self.trajectory),
                ("group", self.group),
                (kind, getattr(self, kind)),
            )
            if given is not None
        ]
        if self.step is not None and (self.group is not None or self.trajectory is not None):
            things.append(f"--step {self.step}")
        if len(things) > 1:
            raise UserError(f"{' and '.join(things)}: do not go together")
        if self.colour is not None:
            colouring.check(self.colour)
            if self.trajectory is None:
                raise UserError(f"--colour {self.colour}: goes with --trajectory")
        if self.trajectory is not None:
            parse(self.trajectory)

    @property
    def numbers(self) -> dict[Kind, int]:
        """How many of the best and of the worst."""
        numbers: dict[Kind, int] = {}
        if self.best is not None:
            numbers["best"] = self.best
        if self.worst is not None:
            numbers["worst"] = self.worst
        return numbers

    @property
    def is_run(self) -> bool:
        """Whether it is the run itself."""
        return self == Asked()


def inspect(run_dir: Path, console: Console, **options: Any) -> None:
    """Print what `Asked` of these options asks for.

    Raises:
        UserError: see `Asked` and `show`.
    """
    show(run_dir, Asked(**options), console)


def show(run_dir: Path, asked: Asked, console: Console, *, shortly: bool = False) -> None:
    """Print what is asked; `shortly`: of the run itself what changes with each step.

    Raises:
        UserError: no run there, no such thing in it, or the store is damaged.
    """
    with _opened(run_dir) as reader:
        if asked.trajectory is not None:
            show_trajectory(run_dir, reader, asked.trajectory, console, asked.colour)
        elif asked.group is not None:
            group_view.show(query.group(reader, asked.group), console)
        elif asked.numbers:
            show_best_and_worst(reader, asked.numbers, asked.step, console)
        elif asked.step is not None:
            step_view.show(step_view.found(run_dir, reader, asked.step), console)
        elif shortly:
            overview.show_shortly(run_dir, reader, console)
        else:
            overview.show(run_dir, reader, console)


def as_json(run_dir: Path, asked: Asked) -> str:
    """What is asked as the text of one JSON document, of ASCII alone: nothing in it acts on a
    terminal. Numbers that JSON does not have are null.

    Raises:
        UserError: as `show`; or a colour is asked for.
    """
    if asked.colour is not None:
        raise UserError(f"--colour {asked.colour} and --json: it has what all colours show")
    with _opened(run_dir) as reader:
        found = _found(run_dir, reader, asked)
    return json.dumps(json.loads(msgspec.json.encode(found)), indent=2)


def _found(run_dir: Path, reader: TrajectoryReader, asked: Asked) -> dict[str, Any]:
    if asked.trajectory is not None:
        return tokens.whole(run_dir, reader, parse(asked.trajectory), tokens.texts_of(reader))
    if asked.group is not None:
        return query.group(reader, asked.group)
    if asked.numbers:
        return best_and_worst(reader, asked.numbers, asked.step)
    if asked.step is not None:
        return step_view.found(run_dir, reader, asked.step)
    return overview.as_json(run_dir, reader)


def _opened(run_dir: Path) -> AbstractContextManager[TrajectoryReader]:
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such directory")
    return open_undamaged(store_of(run_dir))


__all__ = ["Asked", "as_json", "inspect", "show"]
