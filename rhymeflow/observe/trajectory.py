"""One response in full, for `rhymeflow inspect --trajectory`, its tokens coloured if asked for.

Holds true: nothing of the response acts on the terminal; no line is wider than the console.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rhymeflow.core.types import TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.observe.colouring import check, coloured
from rhymeflow.observe.printable import conversation, printable
from rhymeflow.observe.tokens import Load, details_of, texts_of, tokens_of, whole
from rhymeflow.store.reader import TrajectoryDetails, TrajectoryReader


def parse(text: str) -> TrajectoryId:
    """Return the response of this name, `group.member`.

    Raises:
        UserError: that is no name of one.
    """
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    if match is None:
        raise UserError(f"--trajectory {text}: is not GROUP.MEMBER, such as 12.3")
    return TrajectoryId(int(match[1]), int(match[2]))


def show_trajectory(
    run_dir: Path,
    reader: TrajectoryReader,
    name: str,
    console: Console,
    colour: str | None = None,
    load: Load | None = None,
) -> None:
    """Print prompt, response, rewards and segments of trajectory `name` (`group.member`); with
    `colour`, one of `COLOURINGS`, token by token, as texts of what `load` gives.

    Raises:
        UserError: that is no name of a trajectory, there is none of it, or what `colour` shows is
            not known of it.
    """
    trajectory = parse(name)
    details = details_of(run_dir, reader, trajectory)
    response = None
    if colour is not None:
        response = _coloured(
            whole(run_dir, reader, trajectory, texts_of(reader, load)), colour, console
        )
    console.print(_overview(details))
    console.print(_panel("prompt", conversation(details.prompt)))
    if response is not None:
        console.print(response)
    elif details.text is not None:
        console.print(_panel("response", details.text))
    elif details.segments and not details.segments[0].tokens:
        console.print(Text("Tokens and text were deleted (run.keep_tokens)."))
    console.print(_segment_table(details))


def _coloured(found: dict[str, Any], colour: str, console: Console) -> RenderableType:
    """Response and legend; where texts of tokens are not to be had, it says so."""
    check(colour)
    tokens = tokens_of(found)
    if not tokens:
        raise UserError(f"--colour {colour}: the tokens were deleted (run.keep_tokens)")
    response = coloured(colour, tokens, console)
    if found["texts"] is not None:
        return response
    note = "The run's tokenizer cannot be loaded here: numbers of tokens."
    return Group(Text(note, style="dim"), response)


def _panel(title: str, text: str) -> Panel:
    return Panel(Text(printable(text)), title=title, title_align="left")


def _overview(details: TrajectoryDetails) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    rows = [
        ("trajectory", str(details.trajectory)),
        ("prompt", f"row {details.row}, epoch {details.epoch}"),
        ("columns", ", ".join(f"{k} = {v}" for k, v in details.columns.items()) or "none"),
        ("length", _length(details)),
        ("reward", _reward(details)),
        ("ending", _ending(details)),
    ]
    for label, text in rows:
        grid.add_row(label, Text(printable(text)))
    return grid


def _length(details: TrajectoryDetails) -> str:
    if details.length is None:
        return f"{sum(s.length for s in details.segments)} tokens so far"
    return f"{details.length} tokens, ended by {details.reason}"


def _reward(details: TrajectoryDetails) -> str:
    if details.reward is None:
        return "none yet"
    parts = ", ".join(f"{name} {value:g}" for name, value in (details.components or {}).items())
    return f"{details.reward:g}" + (f" ({parts})" if parts else "")


def _ending(details: TrajectoryDetails) -> str:
    if details.ending is None:
        return "open"
    if details.ending != "consumed":
        return f"{details.ending}: {details.ending_reason}"
    batch = details.trained
    if batch is None:
        return "aborted: its group did not need it"
    age = batch - min(segment.version for segment in details.segments)
    return f"trained on in step {batch + 1}, {age} version{'' if age == 1 else 's'} old"


def _segment_table(details: TrajectoryDetails) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title="Segments", title_justify="left")
    drafts = ("acceptance\nlength", "drafted", "accepted")
    for heading in ("from", "to", "version", "instance", "mean\nlogprob", *drafts):
        table.add_column(heading, justify="right", no_wrap=True)
    for segment in details.segments:
        count, logprobs = segment.length, [] if segment.is_observed else segment.logprobs
        table.add_row(
            str(segment.start),
            str(segment.start + count - 1),
            str(segment.version),
            segment.instance,
            number(sum(logprobs) / count if logprobs else None, ".3f"),
            *draft_cells(count, segment.steps, segment.drafted),
        )
    return table


def draft_cells(tokens: int, steps: int, drafted: int) -> tuple[str, str, str]:
    """Mean acceptance length, drafted tokens, and the share of them that was accepted; dashes for
    what an environment answered, in no iteration."""
    if not steps:
        return "-", "-", "-"
    # Each iteration makes one token without any draft.
    accepted = (tokens - steps) / drafted if drafted else None
    return f"{tokens / steps:.2f}", f"{drafted:,}", number(accepted, ".1%")


def number(value: float | None, spec: str) -> str:
    """The value, or a dash where there is none."""
    return "-" if value is None else format(value, spec)
