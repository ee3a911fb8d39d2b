"""Workers that serve in a thread of this process, over a real connection."""

import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rhymeflow.workers.messages import Shutdown, send


@pytest.fixture
def serving():
    """Have a function serve one end of a pipe, its first argument; returns the controller's end."""
    started = []

    def serve(main: Callable[..., None], *arguments: Any) -> Any:
        ours, theirs = multiprocessing.Pipe()
        thread = threading.Thread(target=main, args=(theirs, *arguments))
        thread.start()
        started.append((ours, thread))
        return ours

    yield serve
    for ours, thread in started:
        send(ours, Shutdown())
        thread.join(timeout=20)
        assert not thread.is_alive()
