"""`rhymeflow dashboard` serves the pages of some runs until Ctrl-C; `train --dashboard` those of a
run that is about to begin, until it ends.

They listen on this machine alone, unless another address is asked for by name. Their address, with
a token that is drawn at each start, is printed once it answers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn

from rhymeflow.dashboard.run import Run
from rhymeflow.dashboard.server import LOOPBACK, make_app
from rhymeflow.errors import UserError
from rhymeflow.observe.query import TokenTexts
from rhymeflow.store.schema import EVENTS

HERE = "127.0.0.1"
PORT = 8750
LOADING_AFTER = 2.0
"""Seconds until tokenizers are loaded, which takes some and holds up what is asked meanwhile; the
first question is not for tokens."""
_PORTS = 20
_NICENESS = 10
"""Of pages beside a run, which give way to it where processors are short."""
_POLL_SECONDS = 0.2
_PATIENCE = 5.0
"""Seconds that their process has to end."""


def serve(directories: Sequence[Path], *, host: str = HERE, port: int | None = None) -> None:
    """Serve pages over these runs, or over the newest in `runs`, and print their address. Raises
    `UserError` if there is no run, or nothing can listen there."""
    if not directories:
        from rhymeflow.config.run import RUNS  # loads the whole configuration

        directories = [newest(RUNS)]
    runs = named(directories)
    token = secrets.token_urlsafe(16)
    is_local = host in LOOPBACK
    with contextlib.closing(listening(host, port)) as listener:
        server = server_of(runs, token, hosts=LOOPBACK if is_local else None)
        print(address(host if is_local else socket.gethostname(), listener, token), flush=True)
        if is_local:
            number = listener.getsockname()[1]
            tunnel = f"ssh -L {number}:127.0.0.1:{number} HOST"
            print(f"from another machine: {tunnel}, then the same address", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])


def server_of(
    runs: Sequence[Run], token: str, *, hosts: frozenset[str] | None = LOOPBACK
) -> uvicorn.Server:
    """A server of pages over these runs; `hosts` as for `make_app`."""
    texts = TokenTexts()

    def load() -> None:
        for run in runs:
            with contextlib.suppress(UserError), run.reader() as reader:  # who asks will be told
                texts.of(reader, [])

    loading = threading.Timer(LOADING_AFTER, load)
    loading.daemon = True
    loading.start()
    app = make_app(runs, texts, token=token, hosts=hosts)
    return uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))


def address(host: str, listener: socket.socket, token: str) -> str:
    """What a browser is to open."""
    return f"http://{host}:{listener.getsockname()[1]}/?token={token}"


def newest(directory: Path) -> Path:
    """The run of this directory that was written to last. Raises `UserError` if there is none."""
    found = [path.parent for path in directory.glob(f"*/{EVENTS}")]
    if not found:
        raise UserError(f"{directory}: has no run; name a run directory")
    return max(found, key=lambda run: (run / EVENTS).stat().st_mtime)


def named(directories: Sequence[Path]) -> list[Run]:
    """Runs by the names of their directories, with as much of the path as tells them apart."""
    paths = list(dict.fromkeys(directory.resolve() for directory in directories))
    length = 1
    while len({path.parts[-length:] for path in paths}) < len(paths):
        length += 1
    return [Run(path, "-".join(path.parts[-length:]).lstrip("/")) for path in paths]


def listening(host: str, port: int | None) -> socket.socket:
    """A socket that listens; of `PORT` and those that follow it the first that is free. Raises
    `UserError` if nothing can listen there."""
    for number in [port] if port is not None else range(PORT, PORT + _PORTS):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio sends at once (TCP_NODELAY) where the socket says that it is TCP. Else an answer's
        # body waits 40 ms for its head to be acknowledged.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host.strip("[]"), number))
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or port is not None:
                raise UserError(f"--host {host} --port {number}: {error.strerror}") from None
            continue
        listener.listen(128)
        return listener
    raise UserError(f"ports {PORT} to {PORT + _PORTS - 1} are taken; --port names another")


# -- beside a run ----------------------------------------------------------------------------------


@contextlib.contextmanager
def beside(run_dir: Path) -> Iterator[str]:
    """Serve pages over the run that begins in `run_dir`, in a process of their own, until the block
    ends; their address, which a browser may open before the process is up.

    Raises:
        UserError: no port is free.
    """
    token = secrets.token_urlsafe(16)
    with contextlib.closing(listening(HERE, None)) as listener:
        number = listener.fileno()
        command = [sys.executable, "-m", "rhymeflow.dashboard.serve", str(run_dir), str(number)]
        # Ctrl-C in the terminal is the run's: that ends, and then this.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[number],
            start_new_session=True,
        )
        found = address(HERE, listener, token)
    assert process.stdin is not None
    try:
        process.stdin.write(f"{token}\n".encode())
        process.stdin.flush()
        yield found
    finally:
        process.stdin.close()  # by which it knows, also where this process is killed
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _serve_beside(run_dir: Path, number: int) -> None:
    """Serve, until standard input ends."""
    os.nice(_NICENESS)
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
        time.sleep(_POLL_SECONDS)
    server = server_of([Run(run_dir, run_dir.name)], token)
    with contextlib.closing(socket.socket(fileno=number)) as listener:
        if not ended.is_set():
            server.run(sockets=[listener])


if __name__ == "__main__":
    _serve_beside(Path(sys.argv[1]), int(sys.argv[2]))
