"""A connection on which every message arrives once, whatever carries it.

A transport that reconnects may deliver messages twice and late, so they are numbered, and one whose
number has come before is dropped. Both ends have to be channels.
"""

from __future__ import annotations

import struct
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_NUMBER = struct.Struct("<Q")


class Channel:
    """One end, over a connection of `multiprocessing` or one like it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._num_sent = self._num_received = 0
        self._arrived: bytes | None = None  # and nobody has taken it
        self._sending = threading.Lock()

    def send_bytes(self, message: bytes) -> None:
        """Send a message; any thread may."""
        with self._sending:
            self._num_sent += 1
            self._connection.send_bytes(_NUMBER.pack(self._num_sent) + message)

    def read(self) -> bytes | None:
        """Wait for a message; None: it had arrived before."""
        frame = self._connection.recv_bytes()
        (number,) = _NUMBER.unpack_from(frame)
        if number <= self._num_received:
            return None
        assert number == self._num_received + 1, "a message was lost"
        self._num_received = number
        return frame[_NUMBER.size :]

    def recv_bytes(self) -> bytes:
        """Wait for the next message. Raises `EOFError` if the other end is gone."""
        message, self._arrived = self._arrived, None
        while message is None:
            message = self.read()
        return message

    def poll(self, timeout: float = 0.0) -> bool:
        """Whether there is a message; waits so many seconds for one. Raises `EOFError` likewise."""
        deadline = time.monotonic() + timeout
        while self._arrived is None and self._connection.poll(timeout):
            self._arrived = self.read()
            timeout = max(0.0, deadline - time.monotonic())
        return self._arrived is not None

    def fileno(self) -> int:
        """To wait on, while `poll(0)` is false."""
        return self._connection.fileno()

    def close(self) -> None:
        """Give it back."""
        self._connection.close()
