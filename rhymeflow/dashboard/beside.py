"""`train --dashboard`: pages over a run that is about to begin, in a process of their own.

Holds true: they end with the run, however that ends; they give way to it where processors are
short; the address is known before the process is up, and a browser that opens it waits. The token
is in no list of processes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rhymeflow.dashboard.run import Run
from rhymeflow.dashboard.serve import address, listening, new_token, server_of
from rhymeflow.store.schema import EVENTS

HOST = "127.0.0.1"
NICENESS = 10
POLL_SECONDS = 0.2
PATIENCE = 5.0
"""Seconds that the process has to end."""


@contextlib.contextmanager
def beside(run_dir: Path) -> Iterator[str]:
    """Serve pages over the run that begins in `run_dir`, until the block ends; their address.

    Raises:
        UserError: no port is free.
    """
    token = new_token()
    with contextlib.closing(listening(HOST, None)) as listener:
        number = listener.fileno()
        command = [sys.executable, "-m", "rhymeflow.dashboard.beside", str(run_dir), str(number)]
        # Ctrl-C in the terminal is the run's: that ends, and then this.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[number],
            start_new_session=True,
        )
        found = address(HOST, listener, token)
    assert process.stdin is not None
    try:
        process.stdin.write(f"{token}\n".encode())
        process.stdin.flush()
        yield found
    finally:
        process.stdin.close()  # by which it knows, also where this process is killed
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(run_dir: Path, number: int) -> None:
    """Serve, until standard input ends."""
    os.nice(NICENESS)
    token = sys.stdin.readline().strip()
    ended = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        ended.set()
        if server is not None:
            server.should_exit = True

    server = None
    threading.Thread(target=watch, daemon=True).start()
    while not (run_dir / EVENTS).is_file():
        if ended.is_set():
            return
        time.sleep(POLL_SECONDS)
    server = server_of([Run(run_dir, run_dir.name)], token)
    with contextlib.closing(socket.socket(fileno=number)) as listener:
        if not ended.is_set():
            server.run(sockets=[listener])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
