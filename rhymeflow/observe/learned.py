"""What a run has learned, for `rhymeflow inspect`: curves, and its best and worst responses.

Holds true: every line fits the console; a response is shown by what is stored of it, whether it was
trained on or not. Knows the names of metrics, not their meaning.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rhymeflow.config import yaml
from rhymeflow.observe.printable import conversation, printable, shortened
from rhymeflow.observe.progress import clock, sparkline
from rhymeflow.observe.runs import state_of
from rhymeflow.store import codec
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.suites.metrics import headlines

_CURVE_WIDTH = 20
_NAME_WIDTH = 20
_RESPONSE_LINES = 3
_NUM_SHOWN = 2

_STATES = {
    "running": "it is running",
    "ended": "it has ended",
    "stopped": "it was stopped",
    "killed": "it was killed",
}

Kind = Literal["best", "worst"]
Steps = dict[int, dict[str, Any]]

# Of equal rewards other groups come before further members of one, and newer groups before older.
_BY_REWARD = """
SELECT group_id, member, reward, components, text, length, reason, trained, ending, ending_reason,
    prompt, columns
FROM trajectories JOIN groups USING (group_id)
WHERE reward IS NOT NULL AND suite IS NULL AND (?1 IS NULL OR trained = ?1)
ORDER BY reward {order}, ROW_NUMBER() OVER (PARTITION BY group_id, reward ORDER BY member),
    group_id DESC
LIMIT ?2
"""


@dataclass(frozen=True)
class Response:
    """A rewarded response, as `find` finds it."""

    group: int
    member: int
    reward: float
    components: str
    text: str | None
    length: int
    reason: str
    trained: int | None
    ending: str | None
    ending_reason: str | None
    prompt: str
    columns: str


# -- the whole run --------------------------------------------------------------------------------


def show_curves(run_dir: Path, steps: Steps, reader: TrajectoryReader, console: Console) -> None:
    """How far the run is, and what became of rewards."""
    console.print(Text(_headline(run_dir, steps, reader), style="bold"), soft_wrap=False)
    if any(step > 0 for step in steps):
        console.print(_curves(steps))
    else:
        console.print(Text("No step has been completed. " + _so_far(reader)))
        evaluated = [row["eval/reward"] for row in steps.values() if "eval/reward" in row]
        if evaluated:
            console.print(Text(f"Held-out reward before training: {_figure(evaluated[0])}"))


def show_last_responses(steps: Steps, reader: TrajectoryReader, console: Console) -> None:
    """Some of the best and the worst responses of the last batch, or of all there are so far."""
    # A batch that is being trained on has no metrics yet.
    ((last,),) = reader.query(
        "SELECT MAX(trained) FROM trajectories WHERE trained < ?", max(steps, default=0)
    )
    ((count,),) = reader.query(
        "SELECT COUNT(*) FROM trajectories"
        " WHERE reward IS NOT NULL AND group_id >= 0 AND (?1 IS NULL OR trained = ?1)",
        last,
    )
    number = min(_NUM_SHOWN, count // 2)
    where = "so far" if last is None else f"of step {last + 1}"
    for kind in ("best", "worst") if number else ():
        found = find(reader, kind, number, last)
        _show_responses(f"{kind.capitalize()} responses {where}", found, console)
    if number:
        console.print()
        console.print(Text("More: --worst N, --best N, --trajectory G.M", style="dim"))


def _headline(run_dir: Path, steps: Steps, reader: TrajectoryReader) -> str:
    name, planned = run_dir.resolve().name, None
    path = run_dir / "config.yaml"
    if path.is_file():
        node = yaml.compose(path.read_text(), str(path))
        config = yaml.construct(node, str(path)) if node is not None else {}
        name = f"{config.get('name')}, {config.get('schedule', {}).get('name')}"
        planned = config.get("learner", {}).get("max_steps")
    step = max(steps, default=0)
    of = f" of {planned}" if planned is not None else ""
    times = reader.query("SELECT time FROM events ORDER BY seq DESC LIMIT 1")
    after = f" after {clock(times[0][0])}" if times else ""
    state = state_of(run_dir, reader)
    how = "" if (step, state) == (planned, "ended") else f"; {_STATES[state]}"
    return printable(f"{name}: step {step}{of}{after}{how}")


def _so_far(reader: TrajectoryReader) -> str:
    ((groups,),) = reader.query("SELECT COUNT(*) FROM groups WHERE suite IS NULL")
    ((finished, rewarded, mean),) = reader.query(
        "SELECT COUNT(*), COUNT(reward), AVG(reward) FROM trajectories WHERE group_id >= 0"
    )
    text = f"So far: {groups:,} prompts, {finished:,} finished responses, {rewarded:,} rewarded"
    return text + (f", mean reward {_figure(mean)}" if rewarded else "")


def _curves(steps: Steps) -> Table:
    """One line for each number that says what was learned: first, last, best, and its curve."""
    names = [name for name in steps[max(steps)] if _is_function(name)]
    suites = dict.fromkeys(name for row in steps.values() for name in headlines(row))
    lines = [("held-out reward", "eval/reward")]
    lines += [(name, f"eval/{'/'.join(name.rsplit(' ', 1))}") for name in suites]
    lines += [("training reward", "reward")]
    if len(names) > 1:  # one alone is the reward
        lines += [
            (f"  {name.removeprefix('rewards/').removesuffix('/mean')}", name) for name in names
        ]
    lines += [
        ("response tokens", "completions/mean_length"),
        ("cut at the limit", "completions/clipped_ratio"),
        ("entropy", "entropy"),
    ]
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    for _ in range(3):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_row(*(Text(each, style="dim") for each in ("", "first", "last", "highest", "")))
    for label, name in lines:
        points = [(row[name], step) for step, row in steps.items() if row.get(name) is not None]
        if not points:
            continue
        values = [value for value, _ in points]
        # Of equals the first: when it came that far.
        best, at = max(points, key=lambda point: (point[0], -point[1]))
        table.add_row(
            Text(shortened(label, _NAME_WIDTH)),
            _figure(values[0]),
            Text(_figure(values[-1]), style="bold"),
            f"{_figure(best)} at {at}",
            Text(sparkline(_means(values, _CURVE_WIDTH))),
        )
    return table


def _is_function(name: str) -> bool:
    return name.startswith("rewards/") and name.endswith("/mean")


def _means(values: Sequence[float], count: int) -> list[float]:
    """At most `count` values, each the mean of as many neighbours as any other, or one more."""
    count = min(count, len(values))
    edges = [len(values) * place // count for place in range(count + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]


def _figure(value: float) -> str:
    return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 1000 else f"{value:.3g}"


# -- responses ------------------------------------------------------------------------------------


def find(reader: TrajectoryReader, kind: Kind, number: int, trained: int | None) -> list[Response]:
    """So many responses of the best or worst reward, of one batch or (None) of the whole run."""
    statement = _BY_REWARD.format(order="ASC" if kind == "worst" else "DESC")
    return [Response(*row) for row in reader.query(statement, trained, number)]


def best_and_worst(
    reader: TrajectoryReader, numbers: dict[Kind, int], step: int | None
) -> dict[str, list[dict[str, Any]]]:
    """What `show_best_and_worst` shows, in full, as JSON's values."""
    trained = None if step is None else step - 1
    return {
        kind: [_plain(each) for each in find(reader, kind, number, trained)]
        for kind, number in numbers.items()
    }


def _plain(response: Response) -> dict[str, Any]:
    found = {name: value for name, value in vars(response).items() if name != "trained"}
    return found | {
        "step": None if response.trained is None else response.trained + 1,
        "components": json.loads(response.components),
        "prompt": codec.prompt_of(response.prompt),
        "columns": json.loads(response.columns),
    }


def show_best_and_worst(
    reader: TrajectoryReader,
    numbers: dict[Kind, int],
    step: int | None,
    console: Console,
) -> None:
    """So many of the best and of the worst responses of the run, or of those of one step."""
    of = "the run" if step is None else f"step {step}"
    for kind, number in numbers.items():
        found = find(reader, kind, number, None if step is None else step - 1)
        if not found:
            console.print(Text(f"No response of {of} has a reward."))
            return
        _show_responses(f"{kind.capitalize()} responses of {of}", found, console)


def _show_responses(title: str, responses: Sequence[Response], console: Console) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    # Two columns of indentation, nine of labels, and one that stays free.
    width = console.width - 12
    for each in responses:
        parts = json.loads(each.components)
        line = Text.assemble((f"{each.group}.{each.member}", "bold cyan"), f"  {_summary(each)}")
        console.print(line)
        rows = [
            ("prompt", shortened(conversation(each.prompt), width)),
            ("response", _said(each.text, width * _RESPONSE_LINES)),
            ("columns", shortened(_columns(each.columns), width)),
        ]
        if len(parts) > 1:
            rewards = ", ".join(f"{name} {value:g}" for name, value in parts.items())
            rows.insert(0, ("rewards", shortened(rewards, width)))
        for label, text in rows:
            if text:
                console.print(_labelled(label, text, width))


def _labelled(label: str, text: str, width: int) -> Table:
    grid = Table.grid(padding=0)
    grid.add_column(width=11, no_wrap=True, style="dim")
    grid.add_column(width=width, overflow="fold")
    grid.add_row(f"  {label}", Text(text))
    return grid


def _summary(response: Response) -> str:
    """What is said of a response in one line."""
    how = {"stop": "", "length": ", cut at the limit"}.get(response.reason, f", {response.reason}")
    if response.trained is not None:
        end = f"step {response.trained + 1}"
    elif response.ending == "consumed":
        end = "not needed"
    else:
        end = "waits" if response.ending is None else str(response.ending)
    tokens = f"{response.length} token{'' if response.length == 1 else 's'}"
    return f"reward {_figure(response.reward)}, {tokens}{how}, {end}"


def _said(text: str | None, width: int) -> str:
    if text is None:
        return "(no text is stored)"
    return shortened(text, width) if text else "(empty)"


def _columns(columns: str) -> str:
    return ", ".join(f"{name} = {value}" for name, value in json.loads(columns).items())
