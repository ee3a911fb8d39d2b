"""Where `rhymeflow generate` reads what is said, and writes what is answered."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from rhymeflow.errors import UserError


def whole_input() -> str:
    """Return all of standard input as a prompt; the last end of a line is none of it.

    Raises:
        UserError: there is nothing.
    """
    prompt = sys.stdin.read().removesuffix("\n")
    if not prompt:
        raise UserError("generate: the prompt is empty; give it after the model, or on stdin")
    return prompt


def lines() -> Iterator[str]:
    """What is said, line by line, until the end of standard input (Ctrl-D on a terminal)."""
    if not sys.stdin.isatty():
        # Not by `input`, which loses an interrupt that comes while it flushes the output.
        while line := sys.stdin.readline():
            yield line.removesuffix("\n")
        return
    while True:
        try:
            yield input("> ")
        except EOFError:
            return


def write(text: str) -> None:
    """Show text at once."""
    print(text, end="", flush=True)


def nobody_reads() -> None:
    """Write to nowhere from now on: whoever read has seen enough (`| head`)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
