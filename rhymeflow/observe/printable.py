"""Formats text for the terminal without control characters, and numbers, times and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rhymeflow.store import codec

_GAP = " ... "
_LINE_END = "⏎"
_SPARKS = "▁▂▃▄▅▆▇█"


def printable(text: str) -> str:
    """Escape unprintable characters other than line ends."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text.replace("\r\n", "\n").expandtabs(4)
    )


def shortened(text: str, width: int) -> str:
    """Return the text on one line of at most `width` columns, without its middle if it is longer.
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


def excerpt(text: str, console: Console, width: int, height: int, *, head: float) -> list[Text]:
    """Return the text in at most `height` lines of at most `width` columns. If it is longer, its
    middle is left out; the share `head` of the lines is its beginning."""
    room = width * height
    is_cut = len(text) > 2 * room
    if is_cut:  # a response can be long
        text = f"{text[:room]}\n{text[-room:]}"
    lines = list(Text(printable(text)).wrap(console, width, overflow="fold"))
    if not is_cut and len(lines) <= height:
        return lines
    first = int(head * (height - 1))
    last = max(first, len(lines) - (height - 1 - first))
    return [*lines[:first], Text(_GAP.strip()), *lines[last:]]


def _start(line: str, width: int) -> str:
    """Return the longest beginning that fits into `width` columns."""
    taken = 0
    for place, char in enumerate(line):
        taken += cell_len(char)
        if taken > width:
            return line[:place]
    return line


def conversation(prompt: str | list[dict[str, Any]]) -> str:
    """Return a prompt, as it is stored or as messages, as text."""
    decoded = codec.prompt_of(prompt) if isinstance(prompt, str) else prompt
    if isinstance(decoded, str):
        return decoded
    return "\n".join(f"{each['role']}: {each['content']}" for each in decoded)


def number(value: float | None, spec: str) -> str:
    """Format the value; None becomes a dash."""
    return "-" if value is None else format(value, spec)


def clock(seconds: float) -> str:
    """Format seconds as `1:02:03`, or `2:03` below an hour."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def means(values: Sequence[float], count: int) -> list[float]:
    """Return at most `count` means of neighbouring values, of equally many or one more."""
    count = min(count, len(values))
    edges = [len(values) * place // count for place in range(count + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]


def is_flat(low: float, high: float) -> bool:
    """Whether these bounds of values differ by no more than rounding, as those of means do."""
    return high - low <= 1e-9 * max(abs(low), abs(high))


def sparkline(values: Sequence[float], among: Sequence[float] | None = None) -> str:
    """Return a bar per value, scaled to the range of `among`, by default that of the values."""
    low, high = min(among or values), max(among or values)
    if is_flat(low, high):
        return _SPARKS[0] * len(values)
    return "".join(_SPARKS[round((v - low) / (high - low) * (len(_SPARKS) - 1))] for v in values)


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of labels and texts in two columns."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(label, Text(printable(text)))
    return grid


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of right-aligned text."""
    grid = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for heading in headings:
        grid.add_column(heading, justify="right", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    return grid
