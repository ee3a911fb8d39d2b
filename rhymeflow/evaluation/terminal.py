"""Where `rhymeflow generate` reads what is said, and writes what is answered."""

from __future__ import annotations

import contextlib
import os
import select
import signal
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
        yield from _lines_of(sys.stdin.fileno())
        return
    while True:
        try:
            yield input("> ")
        except EOFError:
            return


def _lines_of(file: int) -> Iterator[str]:
    """Lines of a pipe or a file. Reading it by `sys.stdin` or `input` would lose an interrupt that
    comes right before they begin to wait."""
    left = b""
    with _woken_by_signals() as signals:
        while True:
            *whole, left = left.split(b"\n")
            for line in whole:
                yield line.decode(sys.stdin.encoding, "replace")
            ready, _, _ = select.select([file, signals], [], [])
            if signals in ready:  # an interrupt has been raised by now, and this was another one
                os.read(signals, 4096)
            if file not in ready:
                continue
            part = os.read(file, 65_536)
            if not part:
                break
            left += part
    if left:
        yield left.decode(sys.stdin.encoding, "replace")


@contextlib.contextmanager
def _woken_by_signals() -> Iterator[int]:
    """A file that can be read once a signal has come, also one that comes before it is waited
    for."""
    readable, written = os.pipe()
    os.set_blocking(written, False)
    before = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    try:
        yield readable
    finally:
        signal.set_wakeup_fd(before)
        os.close(readable)
        os.close(written)


def write(text: str) -> None:
    """Show text at once."""
    print(text, end="", flush=True)


def nobody_reads() -> None:
    """Write to nowhere from now on: whoever read has seen enough (`| head`)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
