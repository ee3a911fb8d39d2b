"""One step, for `rhymeflow inspect --step`: its metrics, and its groups by spread of reward.

Holds true: no line is wider than the console; columns that do not fit are left out, the least
important first; groups that are not shown are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rhymeflow.errors import UserError
from rhymeflow.observe import metrics, query
from rhymeflow.observe.printable import conversation, printable, shortened
from rhymeflow.observe.progress import clock, sparkline
from rhymeflow.observe.trajectory import number
from rhymeflow.store.reader import TrajectoryReader

MAX_ROWS = 50
_NO_REWARD = "·"
_BARS = 16
"""In a line."""
_SCALE = (0.0, 1.0)
"""Rewards that bars are drawn among, besides those of the step: what all have is seen to be high or
low."""
_LEAST_PROMPT = 20
_COUNTS = 10**12
"""Whole numbers below are written out."""
_NO_LIMIT = 10_000
_NOT_METRICS = ("step", "time")

Group = dict[str, Any]

# Heading, cell; the most important first.
_COLUMNS: tuple[tuple[str, Callable[[Group], str]], ...] = (
    ("spread", lambda group: number(_spread(group), ".3g")),
    ("mean", lambda group: number(group["reward"], ".3f")),
    ("tokens", lambda group: number(group["length"], ".0f")),
    ("longest", lambda group: number(group["length_max"], "")),
    ("stale", lambda group: number(group["staleness_max"], "")),
    ("ending", lambda group: str(group["ending"])),
    ("cut", lambda group: str(group["cut"])),
    ("prompt", lambda group: str(group["row"])),
    ("epoch", lambda group: str(group["epoch"])),
)


def found(run_dir: Path, reader: TrajectoryReader, step: int) -> dict[str, Any]:
    """The step's metrics and groups.

    Raises:
        UserError: the run has not come to it.
    """
    steps = metrics.read(run_dir)
    groups = query.groups_of_step(reader, step) if step > 0 else []
    if step not in steps and not groups:
        last = max(steps, default=None)
        how_far = "no step is complete" if last is None else f"the last one is {last}"
        raise UserError(f"{run_dir}: has no step {step}; {how_far}")
    row = steps.get(step, {})
    return {
        "step": step,
        "time": row.get("time"),
        "metrics": {name: value for name, value in row.items() if name not in _NOT_METRICS},
        "count": len(groups),
        "groups": groups,
    }


def show(step: dict[str, Any], console: Console) -> None:
    """Print what `found` found."""
    ended = "" if step["time"] is None else f", over after {clock(step['time'])}"
    console.print(Text(f"Step {step['step']}{ended}", style="bold"))
    if step["metrics"]:
        console.print(_metrics(step["metrics"], console))
    else:
        console.print("It has no metrics yet.")
    if not step["groups"]:
        console.print("No group belongs to it.")
        return
    console.print(_table(step["groups"], console))
    console.print(Text("More: --group G, --trajectory G.M", style="dim"))


def _metrics(values: dict[str, Any], console: Console) -> Columns:
    lines = [(printable(name), _figure(value)) for name, value in values.items()]
    widest = max(len(figure) for _, figure in lines)
    room = max(min(max(len(name) for name, _ in lines), console.width - widest - 2), 8)
    cells = [
        Text.assemble((shortened(name, room).ljust(room + 1), "dim"), figure.rjust(widest))
        for name, figure in lines
    ]
    return Columns(cells, padding=(0, 4, 0, 0), column_first=True)


def _figure(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, int | float):
        return shortened(str(value), 20)
    is_count = abs(value) < _COUNTS and float(value).is_integer()
    return f"{value:,.0f}" if is_count else f"{value:.4g}"


def _table(groups: Sequence[Group], console: Console) -> Table:
    shown = groups[:MAX_ROWS]
    columns = list(_COLUMNS)
    unlimited = console.options.update(width=_NO_LIMIT)
    while True:
        table = _rows(shown, groups, columns, 0)
        width = Measurement.get(console, unlimited, table).maximum
        if width <= console.width or not columns:
            break
        columns.pop()
    room = console.width - width - 2
    if len(columns) == len(_COLUMNS) and room >= _LEAST_PROMPT:
        table = _rows(shown, groups, columns, room)
    if len(groups) > len(shown):
        table.caption = f"{len(groups) - len(shown)} more with --json"
    return table


def _rows(
    shown: Sequence[Group],
    groups: Sequence[Group],
    columns: Sequence[tuple[str, Callable[[Group], str]]],
    room: int,
) -> Table:
    """`room`: columns of the terminal for the prompt's text."""
    among = [
        *_SCALE,
        *(
            each["reward"]
            for group in groups
            for each in group["members"]
            if each["reward"] is not None
        ),
    ]
    ends = f"from {min(among):g} to {max(among):g}"
    title = f"Groups: {len(groups):,}, by spread of reward; bars {ends}"
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.add_column("group", justify="right", no_wrap=True)
    table.add_column("rewards", overflow="fold", max_width=_BARS)
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    if room:
        table.add_column("", no_wrap=True)
    for group in shown:
        cells = [cell(group) for _, cell in columns]
        if room:
            cells.append(shortened(conversation(group["prompt"]), room))
        bars = "".join(_bar(each["reward"], among) for each in group["members"])
        table.add_row(str(group["group"]), bars, *(Text(cell) for cell in cells))
    return table


def _bar(reward: float | None, among: Sequence[float]) -> str:
    """A reward among these."""
    return _NO_REWARD if reward is None else sparkline([reward], among)


def _spread(group: Group) -> float | None:
    return None if group["reward"] is None else group["reward_max"] - group["reward_min"]


__all__ = ["MAX_ROWS", "found", "show"]
