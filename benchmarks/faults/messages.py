"""Pipes whose messages come twice and late, and the command `rhymeflow` with such pipes.

    python -m benchmarks.faults.messages SEED ACCOUNT train RECIPE

ACCOUNT is a file to which a line is added for each fault: `twice N` or `late N` messages. An end
that is closed is seen as closed at the other one, after all that it had sent.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

TWICE, LATE = 0.02, 0.005
"""Of the messages, how many are followed by a repetition, and how many are late."""
DELAY_SECONDS = (0.1, 0.5)
"""Mean and most."""

MEMORY = 4
"""Messages that may be on their way without having been acknowledged."""


class Transport:
    """One direction of a channel, which loses nothing: what was not acknowledged when a connection
    breaks is sent again over the next one, in order, though some of it may have arrived.

    `twice` and `late`: shares of the messages that are followed by a repetition, or delayed.
    `seconds`: mean and most of a delay.
    """

    def __init__(
        self, rng: random.Random, *, twice: float, late: float, seconds: tuple[float, float]
    ) -> None:
        self._rng, self._twice, self._late, self._seconds = rng, twice, late, seconds
        self._unacknowledged: deque[bytes] = deque(maxlen=MEMORY)
        self.num_twice = 0
        """Messages that were delivered again, so far."""

    def delay(self) -> float:
        """Seconds that the channel stands still before the next message."""
        if self._rng.random() >= self._late:
            return 0.0
        mean, most = self._seconds
        return min(self._rng.expovariate(1 / mean), most)

    def deliver(self, message: bytes) -> list[bytes]:
        self._unacknowledged.append(message)
        if self._rng.random() >= self._twice:
            return [message]
        count = self._rng.randint(1, len(self._unacknowledged))
        self.num_twice += count
        return [message, *list(self._unacknowledged)[-count:]]


Note = Callable[[str, int], None]
"""Is told what was done, `twice` or `late`, and to how many messages."""


def unreliable_pipe(rng: random.Random, note: Note) -> tuple[Connection, Connection]:
    ours, near = Pipe(duplex=True)
    far, theirs = Pipe(duplex=True)
    for source, target in ((near, far), (far, near)):
        transport = Transport(
            random.Random(rng.getrandbits(64)), twice=TWICE, late=LATE, seconds=DELAY_SECONDS
        )
        threading.Thread(
            target=carry, args=(source, target, transport, note), daemon=True, name="relay"
        ).start()
    return ours, theirs


def carry(source: Connection, target: Connection, transport: Transport, note: Note) -> None:
    """Carry messages until one of the ends is closed."""
    try:
        while True:
            message = source.recv_bytes()
            if seconds := transport.delay():
                note("late", 1)
                time.sleep(seconds)
            arriving = transport.deliver(message)
            for each in arriving:
                target.send_bytes(each)
            if len(arriving) > 1:
                note("twice", len(arriving) - 1)
    except (EOFError, OSError):
        shut(target, socket.SHUT_WR)
        shut(source, socket.SHUT_RD)


def shut(connection: Connection, direction: int) -> None:
    """Nothing more is sent, or read: the other end notices. The relay's other thread goes on."""
    with socket.socket(fileno=os.dup(connection.fileno())) as ending:
        try:
            ending.shutdown(direction)
        except OSError:
            return  # it is gone


def main(arguments: list[str]) -> int:
    from rhymeflow import cli
    from rhymeflow.runtime.local import LocalWorker

    seed, account, *command = arguments
    LocalWorker.pipe = staticmethod(  # type: ignore[method-assign]
        partial(unreliable_pipe, random.Random(int(seed)), noting(Path(account)))
    )
    return cli.main(command)


def noting(account: Path) -> Note:
    """Add lines to the account; a kill loses none."""
    descriptor = os.open(account, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def note(what: str, count: int) -> None:
        os.write(descriptor, f"{what} {count}\n".encode())

    return note


def counted(account: Path) -> Counter[str]:
    counts = Counter[str]()
    lines = account.read_text(encoding="utf-8").splitlines() if account.is_file() else []
    for what, count in map(str.split, lines):
        counts[what] += int(count)
    return counts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
