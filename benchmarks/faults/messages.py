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
from collections import Counter
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from benchmarks.faults.transport import Transport

TWICE, LATE = 0.02, 0.005
"""Of the messages, how many are followed by a repetition, and how many are late."""
DELAY_SECONDS = (0.1, 0.5)
"""Mean and most."""

Note = Callable[[str, int], None]
"""Is told what was done, `twice` or `late`, and to how many messages."""


def unreliable_pipe(rng: random.Random, note: Note) -> tuple[Connection, Connection]:
    """The controller's end and the worker's."""
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
    """Run one command and return its exit code."""
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
    """What the account says."""
    counts = Counter[str]()
    if account.is_file():
        for line in account.read_text(encoding="utf-8").splitlines():
            what, count = line.split()
            counts[what] += int(count)
    return counts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
