"""What stops a program: Ctrl-C, and the signals of clusters and of a terminal that is closed.

What a caller, or `nohup`, has done about a signal stays.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What people and clusters stop a run with, and what a closed terminal sends."""


@contextmanager
def taking(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Have `handler` called with these signals in the block, in the main thread: no other may."""
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
    """All of them raise `KeyboardInterrupt` in the block, as Ctrl-C does."""
    plain = [each for each in STOP_SIGNALS if signal.getsignal(each) is signal.SIG_DFL]
    with taking(plain, signal.default_int_handler):
        yield


def not_ignored() -> list[int]:
    """All but SIGHUP under `nohup`."""
    has_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [each for each in STOP_SIGNALS if not (each is signal.SIGHUP and has_nohup)]
