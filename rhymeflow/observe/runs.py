"""`rhymeflow runs`: lists the runs below directories, one per line.

A run that cannot be read is listed with the problem."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rhymeflow.config.run import RUNS
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics, query
from rhymeflow.observe.printable import clock, number, printable, table
from rhymeflow.observe.query import Record
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.schema import EVENTS

_DEEPEST = 3
_GIVING_WAY = ("trained\n/s", "recipe", "began\n(UTC)", "time")
"""Columns that a narrow terminal does not get, in this order: names of runs are never cut."""


def find(directories: Sequence[Path]) -> list[Path]:
    """Return the run directories among and below these, each once. Raises `UserError` if one is
    missing, or holds no run."""
    run_dirs: dict[Path, None] = {}
    for directory in directories:
        if not directory.is_dir():
            raise UserError(f"{directory}: no such directory")
        runs = list(_below(directory, _DEEPEST))
        if not runs:
            raise UserError(f"{directory}: holds no run, at most {_DEEPEST} directories deep")
        run_dirs |= dict.fromkeys(runs)
    return list(run_dirs)


def _below(directory: Path, levels: int) -> Iterator[Path]:
    if (directory / EVENTS).is_file():
        yield directory
    elif levels:
        for each in sorted(directory.iterdir()):
            if each.is_dir() and not each.name.startswith("."):
                yield from _below(each, levels - 1)


def read(path: Path) -> Record:
    """Return the figures of the run in `path`. `trajectories`: responses trained on; `seconds`:
    without the time between attempts, of the cluster if one is `emulated`; `started`: date and time
    (UTC) of the first attempt. Raises `UserError` if it cannot be read."""
    rows = metrics.rows(path)
    with open_undamaged(path / EVENTS) as reader:
        run, trained = query.overview(path, reader, rows), sum(query.trained(reader).values())
    if not run["attempts"]:
        raise UserError(f"{path}: the run has not begun")
    config, seconds, steps = run["config"], run["seconds"], metrics.by_step(rows)
    rewards = [*query.held_out(steps).values()]
    return {
        "path": str(path),
        "recipe": config.get("name", "run"),
        "schedule": config.get("schedule", {}).get("name", ""),
        "state": run["state"],
        "steps": max(steps, default=0),
        "max_steps": run["max_steps"],
        "verdicts": [verdict["name"] for verdict in run["verdicts"]],
        "eval_reward_first": rewards[0] if rewards else None,
        "eval_reward_best": max(rewards, default=None),
        "eval_reward_last": rewards[-1] if rewards else None,
        "trajectories": trained,
        "trajectories_per_s": trained / seconds if trained and seconds else None,
        "seconds": seconds,
        "emulated": run["emulated"],
        "started": run["attempts"][0]["started"],
    }


def as_json(directories: Sequence[Path]) -> list[Record]:
    """Return the runs below these directories, by default below `runs`, with the newest last, then
    those that cannot be read with their `problem`."""
    runs: list[Record] = []
    unreadable: list[Record] = []
    for path in find(list(directories) or [RUNS]):
        try:
            runs.append(read(path))
        except UserError as error:
            problem = str(error).removeprefix(f"{path}: ")
            unreadable.append({"path": str(path), "problem": problem})
    return [*sorted(runs, key=lambda run: (run["started"], run["path"])), *unreadable]


def show(directories: Sequence[Path], console: Console) -> None:
    """Print `as_json` as a table."""
    records = as_json(directories)
    if runs := [run for run in records if "problem" not in run]:
        _print_whole(runs, console)
        if any(run["verdicts"] for run in runs):
            console.print("! rhymeflow inspect RUN says what keeps it from learning", style="dim")
        if any(run["emulated"] for run in runs):
            console.print("* of the cluster that the run emulates, as its rate", style="dim")
    for run in records:
        if "problem" in run:
            line = printable(f"{run['path']}: {run['problem']}")
            console.print(Text(line), soft_wrap=True)


def _print_whole(runs: Sequence[Record], console: Console) -> None:
    """Print the columns that a terminal has room for. Lines are longer than the console if it is no
    terminal, or if the columns that always stay are too wide."""
    wide = console.options.update(max_width=10**6)
    for count in range(len(_GIVING_WAY) + 1):
        shown = _table(runs, _GIVING_WAY[:count])
        width = console.measure(shown, options=wide).maximum
        if not console.is_terminal or width <= console.width:
            break
    console.width = max(console.width, width)
    console.print(shown)


def _table(runs: Sequence[Record], left_out: Sequence[str]) -> Table:
    paths = [Path(run["path"]).absolute() for run in runs]
    above = Path(os.path.commonpath([path.parent for path in paths]))
    # The common directory is printed once, so that names stay short.
    shortest = min(os.path.relpath(above), str(above), key=len)
    columns = {
        "run": [str(path.relative_to(above)) for path in paths],
        "recipe": [run["recipe"] for run in runs],
        "state": [run["state"] + " !" * bool(run["verdicts"]) for run in runs],
        "steps": [_steps(run) for run in runs],
        "held-out\nfirst": [number(run["eval_reward_first"], ".3f") for run in runs],
        "\nbest": [number(run["eval_reward_best"], ".3f") for run in runs],
        "\nlast": [number(run["eval_reward_last"], ".3f") for run in runs],
        "trained\n/s": [number(run["trajectories_per_s"], ".1f") for run in runs],
        "time": [clock(run["seconds"]) + "*" * bool(run["emulated"]) for run in runs],
        "began\n(UTC)": [f"{run['started'][5:10]} {run['started'][11:16]}" for run in runs],
    }
    shown = {heading: cells for heading, cells in columns.items() if heading not in left_out}
    title = "" if shortest == "." else f"in {shortest}"
    return table(title, [*shown], zip(*shown.values(), strict=True))


def _steps(run: Record) -> str:
    """Return the steps done, and of how many unless all are."""
    is_all = run["max_steps"] in (None, run["steps"])
    return f"{run['steps']}" if is_all else f"{run['steps']}/{run['max_steps']}"
