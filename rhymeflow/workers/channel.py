"""One end of a connection on which every message arrives once, whatever carries it.

A transport that loses its connection and sends again what was not acknowledged may deliver messages
twice, and late. So they are numbered: one whose number has come before is passed over. Both ends of
a connection have to be channels.
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
    """A connection over another one, or what is like one of `multiprocessing`."""

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
        """The next thing that arrives; waits for it. `None`: it had arrived before."""
        frame = self._connection.recv_bytes()
        (number,) = _NUMBER.unpack_from(frame)
        if number <= self._num_received:
            return None
        assert number == self._num_received + 1, "a message was lost"
        self._num_received = number
        return frame[_NUMBER.size :]

    def recv_bytes(self) -> bytes:
        """The next message; waits for it. Raises `EOFError` if the other end is gone."""
        message, self._arrived = self._arrived, None
        while message is None:
            message = self.read()
        return message

    def poll(self, timeout: float = 0.0) -> bool:
        """Whether there is a message; waits so many seconds for one.

        Raises:
            EOFError: the other end is gone.
        """
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
