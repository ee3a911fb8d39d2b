"""Draws a curve on a terminal with braille characters, which have two columns of four dots each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.text import Text

from rhymeflow.observe.printable import is_flat

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
