"""Text for the terminal without control characters; numbers, times, tables and curves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len, chop_cells
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
    start, *_ = chop_cells(line, head)
    end, *_ = chop_cells(line[::-1], width - len(_GAP) - head)
    return start + _GAP + end[::-1]


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


# -- curves ----------------------------------------------------------------------------------------

_BLANK = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bit of each dot of a character, by column and row (Unicode, "Braille Patterns")."""

Point = tuple[float, float]


def curve(points: Sequence[Point], width: int, height: int, style: str = "") -> Text:
    """Return `height` lines of at most `width` columns: the points joined by straight lines, a
    vertical axis with the least and greatest value, and a horizontal one with the first and last
    place. Points are in ascending order of their places; several of one column are averaged."""
    rows = height - 2  # without the horizontal axis
    low, high = min(y for _, y in points), max(y for _, y in points)
    if is_flat(low, high):  # a curve without height is drawn in the middle
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    levels = {0: high, (rows - 1) // 2: (low + high) / 2, rows - 1: low}
    marks = {row: f"{level:.4g}" for row, level in levels.items()}
    margin = max(map(len, marks.values()))
    columns = max(width - margin - 2, 1)
    text = Text()
    for row, line in enumerate(_plot(points, low, high, columns, rows)):
        axis = "┤" if row in marks else "│"
        text.append(f"{marks.get(row, ''):>{margin}} {axis}", style="dim")
        text.append(f"{line}\n", style=style)
    first, last = f"{points[0][0]:.0f}", f"{points[-1][0]:.0f}" if len(points) > 1 else ""
    text.append(f"{'':{margin}} └{'─' * columns}\n", style="dim")
    text.append(f"{'':{margin + 2}}{first}{last:>{max(columns - len(first), 1)}}", style="dim")
    return text


def _plot(points: Sequence[Point], low: float, high: float, columns: int, rows: int) -> list[str]:
    bits = [[_BLANK] * columns for _ in range(rows)]
    above = None
    for column, value in enumerate(_by_column(points, 2 * columns)):
        dot = round((high - value) / (high - low) * (4 * rows - 1))
        # The curve goes up and down between columns without a gap.
        start = dot if above is None else above + (dot > above) - (dot < above)
        for each in range(min(start, dot), max(start, dot) + 1):
            bits[each // 4][column // 2] |= _DOTS[column % 2][each % 4]
        above = dot
    return ["".join(map(chr, line)).replace(chr(_BLANK), " ") for line in bits]


def _by_column(points: Sequence[Point], count: int) -> list[float]:
    """The curve's value in each of `count` columns of dots, fewer if there is one place alone."""
    first, last = points[0][0], points[-1][0]
    sums: dict[int, list[float]] = {}
    for x, y in points:
        place = round((x - first) / (last - first) * (count - 1)) if last > first else 0
        sums.setdefault(place, []).append(y)
    known = [(place, sum(values) / len(values)) for place, values in sums.items()]
    found = [known[0][1]]
    for (left, a), (right, b) in pairwise(known):
        width = right - left
        found += [a + (b - a) * step / width for step in range(1, width + 1)]
    return found
