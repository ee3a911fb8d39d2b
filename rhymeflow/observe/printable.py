"""Formatting for the terminal: text of models and data without control characters and at most as
wide as allowed, figures, times and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from rhymeflow.store import codec

_GAP = " ... "
_LINE_END = "⏎"
_SPARKS = "▁▂▃▄▅▆▇█"


def printable(text: str) -> str:
    """The text with line ends kept and all other unprintable characters escaped."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text.replace("\r\n", "\n").expandtabs(4)
    )


def shortened(text: str, width: int) -> str:
    """The text on one line of at most `width` columns, with its middle left out if it is longer.
    Wide characters take two columns."""
    is_cut = len(text) > 4 * width
    if is_cut:  # a response can be long
        text = text[: 2 * width] + text[-2 * width :]
    line = printable(text).replace("\n", _LINE_END)
    if not is_cut and cell_len(line) <= width:
        return line
    head = (width - len(_GAP)) // 2
    start = _start(line, head)
    end = _start(line[::-1], width - len(_GAP) - head)[::-1]
    return start + _GAP + end


def _start(line: str, width: int) -> str:
    """The longest beginning that fits."""
    taken = 0
    for place, char in enumerate(line):
        taken += cell_len(char)
        if taken > width:
            return line[:place]
    return line


def conversation(prompt: str | list[dict[str, Any]]) -> str:
    """A prompt, as it is stored or as messages, for reading."""
    found = codec.prompt_of(prompt) if isinstance(prompt, str) else prompt
    if isinstance(found, str):
        return found
    return "\n".join(f"{each['role']}: {each['content']}" for each in found)


def number(value: float | None, spec: str) -> str:
    """The value, or a dash for None."""
    return "-" if value is None else format(value, spec)


def clock(seconds: float) -> str:
    """`1:02:03`, or `2:03` below an hour."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: Sequence[float], among: Sequence[float] | None = None) -> str:
    """One bar per value, scaled from the least to the greatest of `among`, or of the values."""
    low, high = min(among or values), max(among or values)
    if high == low:
        return _SPARKS[0] * len(values)
    return "".join(_SPARKS[round((v - low) / (high - low) * (len(_SPARKS) - 1))] for v in values)


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Labels and texts in two columns."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(label, Text(printable(text)))
    return grid


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of right-aligned text."""
    found = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for heading in headings:
        found.add_column(heading, justify="right", overflow="fold")
    for row in rows:
        found.add_row(*(Text(printable(cell)) for cell in row))
    return found
