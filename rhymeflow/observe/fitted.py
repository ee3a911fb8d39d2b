"""Text of a display that must fit: the longest form that does, or as many lines as it takes.

Holds true: no line is wider than there is room for. Knows nothing of what is said.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text


class Fitted:
    """The first of some forms of a text that fits on a line, or the last one: what holds it cuts
    that as it cuts text."""

    def __init__(self, *forms: str | Text) -> None:
        """`forms`: from the longest to the shortest."""
        self._forms = [Text(each) if isinstance(each, str) else each for each in forms]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        yield next((form for form in self._forms if form.cell_len <= width), self._forms[-1])

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widths = [form.cell_len for form in self._forms]
        return Measurement(min(widths), max(widths)).with_maximum(options.max_width)


class Packed:
    """Items one after the other, on as few lines as hold them; a line ends between items."""

    def __init__(self, items: Sequence[str | Text], between: str = ", ") -> None:
        """An item that is longer than a line is cut."""
        self._items = [Text(each) if isinstance(each, str) else each for each in items]
        self._between = between

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines: list[Text] = []
        at_end = self._between.rstrip()
        for place, item in enumerate(self._items):
            after = "" if place + 1 == len(self._items) else at_end
            so_far = lines[-1].cell_len + len(self._between) if lines else 0
            if lines and so_far + item.cell_len + len(after) <= options.max_width:
                lines[-1].append(self._between)
                lines[-1].append_text(item)
            else:
                if lines:
                    lines[-1].append(at_end)
                lines.append(item.copy())
        for line in lines:
            line.truncate(options.max_width, overflow="ellipsis")
            yield line

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widths = [item.cell_len + len(self._between) for item in self._items]
        return Measurement(max(widths, default=0), sum(widths)).with_maximum(options.max_width)


__all__ = ["Fitted", "Packed"]
