"""The executor's side of one process: start, send, receive, kill.

Two threads do the reading and the writing, so that a process that does not read, or stops in the
middle of what it writes, holds up nobody.

Holds true: `send` and `replies` never wait; `connection`, to wait on, is readable when there are
replies. Knows nothing of what the messages mean.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue

from rhymeflow.environments import worker
from rhymeflow.environments.messages import Question, Reply, decode_reply, encode
from rhymeflow.utils.child import Child


class EnvironmentProcess:
    """A spawned process that runs `worker.main`."""

    def __init__(self, sections_json: str, schemas_json: str, log: str | None) -> None:
        self._child = Child(worker.main, (sections_json, schemas_json, log), "environments")
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._incoming: SimpleQueue[Reply | None] = SimpleQueue()
        awake, self._wake = os.pipe()
        self.connection = Connection(awake, writable=False)
        os.set_blocking(awake, False)
        os.set_blocking(self._wake, False)
        self._lock = threading.Lock()
        self._is_over = False
        for target in (self._read, self._write):
            threading.Thread(target=target, daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    def send(self, question: Question) -> None:
        """Hand over a question; what is asked of a process that is gone is lost."""
        self._outgoing.put(encode(question))

    def replies(self) -> Iterator[Reply | None]:
        """Yield the replies that have arrived, then None if the process has ended."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.connection.fileno(), 4096):
                pass
        with contextlib.suppress(Empty):
            while True:
                yield self._incoming.get_nowait()

    def how_it_ended(self) -> str:
        """Say how a process that closed its pipe came to its end."""
        return self._child.how_it_ended()

    def kill(self) -> None:
        """End the process and those it started, at once.

        The threads end by themselves, and with them the pipe is closed.
        """
        self._child.kill()
        self._outgoing.put(None)
        with self._lock:
            self._is_over = True
            self.connection.close()
            os.close(self._wake)

    def _read(self) -> None:
        reply: Reply | None = None
        while True:
            try:
                reply = decode_reply(self._child.connection.recv_bytes())
            except (EOFError, OSError):
                reply = None
            self._incoming.put(reply)
            with self._lock:
                if self._is_over:
                    return
                with contextlib.suppress(BlockingIOError):  # full: it is awake
                    os.write(self._wake, b"!")
            if reply is None:
                return

    def _write(self) -> None:
        while (question := self._outgoing.get()) is not None:
            try:
                self._child.connection.send_bytes(question)
            except OSError:
                return
