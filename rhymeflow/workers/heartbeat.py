"""Signs of life, by a thread, whatever the worker is doing.

Holds true: each says how far the worker has come (`utils/progress.py`), so that one whose thread
lives and whose work stands still is seen to hang. What a worker does before it can serve (loading,
compiling, vLLM's start) is not counted by itself; for `START_SECONDS` a sign of life counts as
progress there. Knows nothing of roles.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rhymeflow.utils import progress
from rhymeflow.workers.channel import Connection
from rhymeflow.workers.messages import Alive, send

BEAT_SECONDS = 1.0

START_SECONDS = 3600.0
"""Reading the weights of the largest models from slow disks takes less."""


@contextmanager
def beating(connection: Connection) -> Iterator[None]:
    """Say that this process lives, about every second, while the block runs."""
    over, began = threading.Event(), time.monotonic()

    def beat() -> None:
        with suppress(OSError):  # the controller is gone
            while not over.is_set():
                if not progress.has_started and time.monotonic() - began < START_SECONDS:
                    progress.advance()
                send(connection, Alive(progress.pieces))
                over.wait(BEAT_SECONDS)

    threading.Thread(target=beat, daemon=True, name="heartbeat").start()
    try:
        yield
    finally:
        over.set()
