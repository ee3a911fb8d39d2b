"""`rhymeflow inspect`: one question to a run, shown or as JSON; nothing is written."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rhymeflow.core.types import TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics, overview, query
from rhymeflow.observe.printable import (
    clock,
    conversation,
    facts,
    number,
    printable,
    shortened,
    sparkline,
    table,
)
from rhymeflow.observe.query import Kind, Record, TokenTexts
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.previous_run import store_of
from rhymeflow.store.reader import TrajectoryReader

MAX_GROUPS = 50
"""Of a step that are shown, those with the widest spread of rewards."""
_SCALE = (0.0, 1.0)
"""Rewards that bars are drawn among, besides those of the step."""


@dataclass(frozen=True)
class Question:
    """What of a run is asked for; the run, if nothing is given. Raises `UserError` if things
    do not go together, or are none of what they should be."""

    trajectory: str | None = None
    group: int | None = None
    best: int | None = None
    """So many responses, of one `step` if that is given."""
    worst: int | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        for kind, count in self.numbers.items():
            if count < 1:
                raise UserError(f"--{kind} {count}: should be 1 or more")
        names = ["trajectory", "group", *list(self.numbers)[:1]]
        if self.trajectory is not None or self.group is not None:
            names.append("step")
        given = [(name, getattr(self, name)) for name in names]
        things = [f"--{name} {value}" for name, value in given if value is not None]
        if len(things) > 1:
            raise UserError(f"{' and '.join(things)}: do not go together")
        if self.trajectory is not None:
            parse(self.trajectory)

    @property
    def numbers(self) -> dict[Kind, int]:
        """How many of the best and of the worst."""
        given = {kind: getattr(self, kind) for kind in query.KINDS}
        return {kind: count for kind, count in given.items() if count is not None}


def parse(text: str) -> TrajectoryId:
    """Return the response of this name, `group.member`; `UserError` if it is none."""
    match = re.fullmatch(r"(-?\d+)\.(\d+)", text)
    if match is None:
        raise UserError(f"--trajectory {text}: is not GROUP.MEMBER, such as 12.3")
    return TrajectoryId(int(match[1]), int(match[2]))


def as_json(run_dir: Path, question: Question) -> str:
    """The answer as the text of one JSON document, of ASCII alone: nothing in it acts on a
    terminal. Numbers that JSON does not have are null.

    Raises:
        UserError: no run there, no such thing in it, or the store is damaged.
    """
    with _opened(run_dir) as reader:
        found = _answer(run_dir, reader, question)
        if found is None:
            found = query.run(run_dir, reader, metrics.rows(run_dir))
        elif question.trajectory is not None:
            found["texts"] = found["tokens"] and TokenTexts().of(reader, found["tokens"])
    return json.dumps(json.loads(msgspec.json.encode(found)), indent=2)


def inspect(run_dir: Path, question: Question, console: Console) -> None:
    """Print the answer; errors as of `as_json`."""
    with _opened(run_dir) as reader:
        found = _answer(run_dir, reader, question)
        if found is None:
            overview.show(run_dir, reader, console)
        elif question.trajectory is not None:
            _show_trajectory(found, console)
        elif question.group is not None:
            _show_group(found, console)
        elif question.numbers:
            of = "the run" if question.step is None else f"step {question.step}"
            for kind, responses in found.items():
                title = f"{kind.capitalize()} responses of {of}"
                overview.show_responses(title, responses, console)
                if not responses:
                    console.print(Text(f"No response of {of} has a reward."))
        else:
            _show_step(found, console)


def _answer(run_dir: Path, reader: TrajectoryReader, question: Question) -> Record | None:
    """None: the run itself is asked for."""
    if question.trajectory is not None:
        return query.response(run_dir, reader, parse(question.trajectory))
    if question.group is not None:
        return query.group(reader, question.group)
    if question.numbers:
        return {
            kind: query.rewarded(reader, kind, count, question.step)
            for kind, count in question.numbers.items()
        }
    return None if question.step is None else query.step(run_dir, reader, question.step)


def _opened(run_dir: Path) -> AbstractContextManager[TrajectoryReader]:
    return open_undamaged(store_of(run_dir))


# -- a step ----------------------------------------------------------------------------------------


def _show_step(step: Record, console: Console) -> None:
    ended = "" if step["time"] is None else f", over after {clock(step['time'])}"
    console.print(Text(f"Step {step['step']}{ended}", style="bold"))
    if not step["metrics"]:
        console.print("It has no metrics yet.")
    for name, value in step["metrics"].items():
        line = f"{name:<36} {_figure(value)}"
        console.print(Text(printable(line)), no_wrap=True, overflow="ellipsis")
    if not step["groups"]:
        console.print("No group belongs to it.")
        return
    rewards = [each["reward"] for group in step["groups"] for each in group["members"]]
    among = [*_SCALE, *(reward for reward in rewards if reward is not None)]
    bars = f"bars from {min(among):g} to {max(among):g}"
    shown = table(
        f"Groups: {step['count']:,}, by spread of reward; {bars}",
        ("group", "rewards", "mean", "tokens", "longest", "stale", "ending", "cut", "prompt"),
        [_group_row(group, among, console.width - 80) for group in step["groups"][:MAX_GROUPS]],
    )
    if step["count"] > MAX_GROUPS:
        shown.caption = f"{step['count'] - MAX_GROUPS} more with --json"
    console.print(shown)


def _group_row(group: Record, among: Sequence[float], room: int) -> list[str]:
    bars = (
        "·" if each["reward"] is None else sparkline([each["reward"]], among)
        for each in group["members"]
    )
    prompt = f"{group['row']}: {conversation(group['prompt'])}" if room > 10 else f"{group['row']}"
    return [
        str(group["group"]),
        "".join(bars),
        number(group["reward"], ".3f"),
        number(group["length"], ".0f"),
        number(group["length_max"], ""),
        number(group["staleness_max"], ""),
        str(group["ending"]),
        str(group["cut"]),
        shortened(prompt, max(room, 10)),
    ]


def _figure(value: Any) -> str:
    if not isinstance(value, int | float):
        return "-" if value is None else str(value)
    is_count = abs(value) < 10**12 and float(value).is_integer()
    return f"{value:,.0f}" if is_count else f"{value:.4g}"


# -- a group ---------------------------------------------------------------------------------------


def _show_group(group: Record, console: Console) -> None:
    where = f"prompt {group['row']}, {_epoch(group)}, {_ending_of_group(group)}"
    console.print(Text(printable(f"Group {group['group']}: {where}"), style="bold"))
    console.print(_panel("prompt", conversation(group["prompt"])))
    if group["columns"]:
        console.print(Text(shortened(f"columns  {_columns(group['columns'])}", console.width - 1)))
    facts = {"group": group["group"], "ending": group["ending"]}
    overview.show_responses("Responses", [each | facts for each in group["members"]], console)
    if not group["members"]:
        console.print("No token of a response is stored.")
    epochs = [
        [str(each["group"]), number(each["epoch"], ""), number(each["step"], ""),
         number(each["reward"], ".3f"), number(each["length"], ".0f")]
        for each in group["epochs"]
    ]  # fmt: skip
    console.print(table("The same prompt", ("group", "epoch", "step", "reward", "tokens"), epochs))


def _ending_of_group(group: Record) -> str:
    if group["step"] is not None:
        return f"trained on in step {group['step']}"
    return _ended(group)


# -- a response ------------------------------------------------------------------------------------


def _show_trajectory(response: Record, console: Console) -> None:
    reward, parts = response["reward"], response["components"] or {}
    shares = ", ".join(f"{name} {value:g}" for name, value in parts.items())
    rows = [
        ("trajectory", f"{response['group']}.{response['member']}"),
        ("prompt", f"row {response['row']}, {_epoch(response)}"),
        ("columns", _columns(response["columns"]) or "none"),
        ("length", _length(response)),
        ("reward", "none yet" if reward is None else f"{reward:g}" + f" ({shares})" * bool(shares)),
        ("ending", _ending(response)),
    ]
    console.print(facts(rows))
    console.print(_panel("prompt", conversation(response["prompt"])))
    if response["text"] is not None:
        console.print(_panel("response", response["text"]))
    elif response["segments"] and response["tokens"] is None:
        console.print(Text("Tokens and text were deleted (run.keep_tokens)."))
    console.print(_segments(response))


def _epoch(of: Record) -> str:
    return "of a suite" if of["epoch"] is None else f"epoch {of['epoch']}"


def _ended(of: Record) -> str:
    """How a group ended, or that of a response, if it was not trained on."""
    return ": ".join(filter(None, (of["ending"], of["ending_reason"]))) or "open"


def _length(response: Record) -> str:
    if response["length"] is None:
        return f"{sum(each['length'] for each in response['segments'])} tokens so far"
    return f"{response['length']} tokens, ended by {response['reason']}"


def _ending(response: Record) -> str:
    if response["ending"] != "consumed":
        return _ended(response)
    if response["step"] is None:
        return "aborted: its group did not need it"
    age = response["step"] - 1 - min(each["version"] for each in response["segments"])
    return f"trained on in step {response['step']}, {age} version{'' if age == 1 else 's'} old"


def _segments(response: Record) -> Table:
    logprobs, rows = response["logprobs"], []
    for each in response["segments"]:
        start, count, steps = each["start"], each["length"], each["steps"]
        mean = None
        if logprobs and not each["observed"]:
            mean = sum(logprobs[start : start + count]) / count
        figures = query.draft_figures(count, steps, each["drafted"]) if steps else {}
        rows.append([
            f"{start}-{start + count - 1}", str(each["version"]), each["instance"],
            number(mean, ".3f"), number(figures.get("acceptance_length"), ".2f"),
            number(figures.get("drafted"), ",d"), number(figures.get("acceptance_rate"), ".1%"),
        ])  # fmt: skip
    drafts = ("acceptance\nlength", "drafted", "accepted")
    return table("Segments", ("tokens", "version", "instance", "mean\nlogprob", *drafts), rows)


def _panel(title: str, text: str) -> Panel:
    return Panel(Text(printable(text)), title=title, title_align="left")


def _columns(columns: Record) -> str:
    return ", ".join(f"{name} = {value}" for name, value in columns.items())
