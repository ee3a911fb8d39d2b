"""Text of models and data on a terminal: nothing of it acts on the terminal, and it fits.

Holds true: what comes out has no control characters but line ends where they are asked for; widths
are in columns of a terminal, where a wide character takes two.
"""

from __future__ import annotations

from rich.cells import cell_len

from rhymeflow.store import codec

_GAP = " ... "
_LINE_END = "⏎"


def printable(text: str) -> str:
    """The text with its line ends; every other character that does not print is escaped."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text.replace("\r\n", "\n").expandtabs(4)
    )


def shortened(text: str, width: int) -> str:
    """The text on one line of at most `width` columns, its middle left out if it is longer."""
    # What is left out need not be looked at, and a response can be long.
    if len(text) > 4 * width:
        text = text[: 2 * width] + text[-2 * width :]
        is_cut = True
    else:
        is_cut = False
    line = printable(text).replace("\n", _LINE_END)
    if not is_cut and cell_len(line) <= width:
        return line
    head = (width - len(_GAP)) // 2
    start = _start(line, head)
    end = _start(line[::-1], width - len(_GAP) - head)[::-1]
    return start + _GAP + end


def _start(line: str, width: int) -> str:
    """As much of the beginning as fits."""
    taken = 0
    for place, char in enumerate(line):
        taken += cell_len(char)
        if taken > width:
            return line[:place]
    return line


def conversation(prompt: str) -> str:
    """A stored prompt as a person reads it; one of chat messages is stored as JSON."""
    found = codec.prompt_of(prompt)
    if isinstance(found, str):
        return found
    return "\n".join(f"{each['role']}: {each['content']}" for each in found)
