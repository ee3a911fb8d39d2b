"""`rhymeflow runs --compare`: results of runs side by side, and where their configurations differ.

Holds true: a field that all have alike is not shown; where a run lies is no difference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from rhymeflow.observe.printable import printable
from rhymeflow.observe.progress import clock
from rhymeflow.observe.runs import Run, began, plain, read, steps_of
from rhymeflow.observe.trajectory import number
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.previous_run import store_of
from rhymeflow.store.schema import EVENTS

NO_DIFFERENCE = ("run.output_dir", "simulation")
"""Where a run lies, and what has no part in one."""

_LACKING = "(no such field)"

_LAST = (
    ("reward of the last batch", "reward", ".3f"),
    ("tokens of a response, last batch", "completions/mean_length", ".1f"),
    ("staleness, last batch", "staleness/mean", ".2f"),
    ("entropy, last batch", "entropy", ".3f"),
)


@dataclass(frozen=True)
class Compared:
    """A run, its last metrics and the fields of its configuration by their paths."""

    run: Run
    last: Mapping[str, Any]
    fields: Mapping[str, Any]


def load(paths: Sequence[Path]) -> list[Compared]:
    """Read runs.

    Raises:
        UserError: one is none, or cannot be read.
    """
    return [_load(path) for path in paths]


def _load(path: Path) -> Compared:
    store_of(path)
    rows = [row for row in metrics.read(path).values() if "reward" in row]
    return Compared(read(path), rows[-1] if rows else {}, fields_of(path))


def fields_of(path: Path) -> dict[str, Any]:
    """Return the configuration in force of the last attempt at the run in `path`, by the paths of
    its fields; lists are one value."""
    with open_undamaged(path / EVENTS) as reader:
        attempts = reader.attempts()
    found = _flat(json.loads(attempts[-1].config) if attempts else {})
    return {name: value for name, value in found.items() if not name.startswith(NO_DIFFERENCE)}


def _flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{path}{name}.")
        else:
            found[f"{path}{name}"] = value
    return found


def differences(fields: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return {path of a field: its value in each run}, of those that differ, in their order."""
    names = dict.fromkeys(name for each in fields for name in each)
    found = {name: [each.get(name, _LACKING) for each in fields] for name in names}
    return {
        name: values
        for name, values in found.items()
        if any(type(each) is not type(values[0]) or each != values[0] for each in values)
    }


def show(paths: Sequence[Path], console: Console) -> None:
    """Print results of these runs, a column each, and below them what differs.

    Raises:
        UserError: there is one run only, or one of them is none.
    """
    runs = _several(paths)
    names = short_names(paths)
    table = _columns("Results", names)
    for label, cells in _results(runs):
        if any(cell != "-" for cell in cells):
            table.add_row(label, *(Text(printable(cell)) for cell in cells))
    console.print(table)
    found = differences([each.fields for each in runs])
    if not found:
        console.print(Text("Their configurations are the same."))
        return
    table = _columns("What differs", names)
    for name, values in found.items():
        table.add_row(name, *(Text(printable(shown(value))) for value in values))
    console.print(table)


def as_json(paths: Sequence[Path]) -> dict[str, Any]:
    """Return `{runs: [...], differences: {field: [values]}}`, in the order given."""
    runs = _several(paths)
    return {
        "runs": [
            plain(each.run) | {name: each.last.get(name) for _, name, _ in _LAST} for each in runs
        ],
        "differences": differences([each.fields for each in runs]),
    }


def _several(paths: Sequence[Path]) -> list[Compared]:
    if len(paths) < 2:
        raise UserError("--compare: should name two run directories or more")
    return load(paths)


def _results(runs: Sequence[Compared]) -> list[tuple[str, list[str]]]:
    all_runs = [each.run for each in runs]
    return [
        ("recipe", [run.recipe for run in all_runs]),
        ("state", [run.state for run in all_runs]),
        ("steps", [steps_of(run) for run in all_runs]),
        ("held-out reward, first", [number(run.eval_reward_first, ".3f") for run in all_runs]),
        ("held-out reward, best", [number(run.eval_reward_best, ".3f") for run in all_runs]),
        *(
            (label, [number(each.last.get(name), spec) for each in runs])
            for label, name, spec in _LAST
        ),
        ("trajectories trained on", [f"{run.trajectories:,}" for run in all_runs]),
        ("of them a second", [number(run.trajectories_per_s, ".1f") for run in all_runs]),
        ("time", [clock(run.seconds) for run in all_runs]),
        ("began (UTC)", [began(run) for run in all_runs]),
    ]


def _columns(title: str, names: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("", overflow="fold")
    for name in names:
        table.add_column(Text(printable(name)), justify="right", overflow="fold")
    return table


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return what tells the paths apart: as many of their last parts as that takes."""
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts))):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(path) for path in paths]


def shown(value: Any) -> str:
    """A field's value as a configuration has it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


__all__ = ["Compared", "as_json", "differences", "fields_of", "load", "short_names", "show"]
