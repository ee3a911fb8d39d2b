"""One group, for `rhymeflow inspect --group`: its prompt, its responses side by side, the same
prompt in other epochs.

Holds true: no line is wider than the console; nothing of the texts acts on the terminal.
"""

from __future__ import annotations

import json
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rhymeflow.observe.printable import conversation, printable, shortened
from rhymeflow.observe.trajectory import number

_PANEL_WIDTH = 38
"""At least, where the console has as much."""
_TEXT_LINES = 6
_FRAME = 4
"""Columns of a panel's edges and padding."""
_PROMPT_LINES = 12


def show(group: dict[str, Any], console: Console) -> None:
    """Print what `query.group` found."""
    console.print(Text(f"Group {group['group']}: {_summary(group)}", style="bold"))
    prompt = _within(_prompt(group["prompt"]), (console.width - _FRAME) * _PROMPT_LINES)
    console.print(Panel(Text(prompt), title="prompt", title_align="left"))
    if group["columns"]:
        columns = ", ".join(f"{name} = {value}" for name, value in group["columns"].items())
        console.print(Text(f"columns  {shortened(columns, console.width - 9)}"))
    if group["members"]:
        console.print(_side_by_side(group, console.width))
    else:
        console.print("No token of a response is stored.")
    if len(group["epochs"]) > 1:
        console.print(_epochs(group))
    console.print(Text(f"More: --trajectory {group['group']}.M", style="dim"))


def _within(text: str, room: int) -> str:
    """The text with its line ends if it has at most so many characters, else on one line."""
    return printable(text) if len(text) <= room else shortened(text, room)


def _prompt(prompt: str | list[dict[str, Any]]) -> str:
    return prompt if isinstance(prompt, str) else conversation(json.dumps(prompt))


def _summary(group: dict[str, Any]) -> str:
    if group["step"] is not None:
        end = f"trained on in step {group['step']}"
    elif group["ending"] is None:
        end = "open"
    else:
        end = f"{group['ending']}: {group['ending_reason']}"
    return printable(f"prompt {group['row']}, epoch {group['epoch']}, {end}")


def _side_by_side(group: dict[str, Any], width: int) -> Table:
    members = group["members"]
    in_a_row = max(min(width // _PANEL_WIDTH, len(members)), 1)
    each_width = width // in_a_row
    grid = Table.grid(padding=0)
    for _ in range(in_a_row):
        grid.add_column(width=each_width)
    panels = [_response(group["group"], each, each_width - _FRAME) for each in members]
    for start in range(0, len(panels), in_a_row):
        grid.add_row(*panels[start : start + in_a_row])
    return grid


def _response(group: int, member: dict[str, Any], width: int) -> Panel:
    facts = Text()
    for line in _facts(member, width):
        facts.append(f"{line}\n", style="dim")
    text = member["text"]
    if text is None:
        said = "(no text is stored)"
    else:
        said = shortened(text, width * _TEXT_LINES) or "(empty)"
    title = Text.assemble(
        (f"{group}.{member['member']}", "bold cyan"), f" reward {number(member['reward'], '.3f')}"
    )
    body = facts.append_text(Text(said, overflow="fold"))
    return Panel(body, title=title, title_align="left")


def _facts(member: dict[str, Any], width: int) -> list[str]:
    parts = member["components"] or {}
    first, last = member["first_version"], member["last_version"]
    versions = f"version {first}" if first == last else f"versions {first} to {last}"
    reason = member["reason"] or "not complete"
    lines = [f"{member['length']} tokens, {reason}", versions]
    if member["step"] is not None:
        lines[-1] += f", staleness {member['step'] - 1 - first}"
    if len(parts) > 1:  # one alone is the reward
        lines.append(", ".join(f"{name} {value:g}" for name, value in parts.items()))
    return [shortened(line, width) for line in lines]


def _epochs(group: dict[str, Any]) -> Table:
    table = Table(
        box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title="The same prompt", title_justify="left"
    )
    for heading in ("group", "epoch", "step", "reward", "tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in group["epochs"]:
        table.add_row(
            str(each["group"]),
            str(each["epoch"]),
            number(each["step"], ""),
            number(each["reward"], ".3f"),
            number(each["length"], ".0f"),
            style="bold" if each["group"] == group["group"] else None,
        )
    return table


__all__ = ["show"]
