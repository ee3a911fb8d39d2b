"""A connection that delivers every message once, over any transport.

A transport that reconnects may repeat messages. So they are numbered, and a message with an old
number is dropped. Both ends must be channels."""

from __future__ import annotations

import struct
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_NUMBER = struct.Struct("<Q")


class Channel:
    """One end of the connection; wraps a `Connection` of `multiprocessing`, or the like."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._num_sent = self._num_received = 0
        self._arrived: bytes | None = None  # read by `poll`, not returned by `recv_bytes` yet
        self._sending = threading.Lock()

    def send_bytes(self, message: bytes) -> None:
        """Send a message, from any thread."""
        with self._sending:
            self._num_sent += 1
            self._connection.send_bytes(_NUMBER.pack(self._num_sent) + message)

    def read(self) -> bytes | None:
        """Wait for a message and return it; None: it was repeated."""
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
        """Whether a message arrives within `timeout` seconds. Raises `EOFError` as `recv_bytes`."""
        deadline = time.monotonic() + timeout
        while self._arrived is None and self._connection.poll(timeout):
            self._arrived = self.read()
            timeout = max(0.0, deadline - time.monotonic())
        return self._arrived is not None

    def fileno(self) -> int:
        """Return the descriptor to wait on, while `poll(0)` is false."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
