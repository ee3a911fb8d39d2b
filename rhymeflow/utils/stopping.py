"""Handles signals that stop a program: Ctrl-C, and those of clusters and of a closed terminal.

Handlers that a caller or `nohup` has set stay."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Sent by users, clusters and closed terminals."""


@contextmanager
def taking(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Call `handler` on these signals during the block; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextmanager
def as_interrupts() -> Iterator[None]:
    """Make all stop signals raise `KeyboardInterrupt` in the block, as Ctrl-C does."""
    plain = [each for each in STOP_SIGNALS if signal.getsignal(each) is signal.SIG_DFL]
    with taking(plain, signal.default_int_handler):
        yield


def not_ignored() -> list[int]:
    """Return the stop signals, without SIGHUP under `nohup`."""
    has_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [each for each in STOP_SIGNALS if not (each is signal.SIGHUP and has_nohup)]
