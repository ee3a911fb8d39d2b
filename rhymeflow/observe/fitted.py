"""Text of a display that must fit: the longest form that does, or as many lines as it takes.

Holds true: no line is wider than there is room for. Knows nothing of what is said.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text


class Fitted:
    """The first of some forms of a text that fits on a line, or the last one, cut."""

    def __init__(self, *forms: str | Text) -> None:
        """`forms`: from the longest to the shortest."""
        self._forms = [Text(each) if isinstance(each, str) else each for each in forms]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        chosen = next((form for form in self._forms if form.cell_len <= width), self._forms[-1])
        chosen = chosen.copy()
        chosen.truncate(width, overflow="ellipsis")
        yield chosen

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widths = [form.cell_len for form in self._forms]
        return Measurement(min(widths), max(widths)).with_maximum(options.max_width)


class Packed:
    """Items with commas between them, on as few lines as hold them; a line ends between items."""

    def __init__(self, items: Sequence[str]) -> None:
        """An item that is longer than a line is cut."""
        self._items = items

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [""]
        for place, item in enumerate(self._items):
            part = f"{item}," if place + 1 < len(self._items) else item
            joined = f"{lines[-1]} {part}" if lines[-1] else part
            if lines[-1] and cell_len(joined) > options.max_width:
                lines.append(part)
            else:
                lines[-1] = joined
        for line in lines:
            text = Text(line)
            text.truncate(options.max_width, overflow="ellipsis")
            yield text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widest = max((cell_len(item) + 1 for item in self._items), default=0)
        whole = sum(cell_len(item) + 2 for item in self._items)
        return Measurement(widest, whole).with_maximum(options.max_width)


__all__ = ["Fitted", "Packed"]
