"""`rhymeflow dashboard`: serves the pages of some runs until Ctrl-C.

Holds true: it listens on this machine alone, unless another address is asked for by name; its
address, with a token that is drawn at each start, is printed once it answers.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from rhymeflow.dashboard.run import Run
from rhymeflow.dashboard.server import LOOPBACK, make_app
from rhymeflow.errors import UserError
from rhymeflow.observe.tokens import TokenTexts
from rhymeflow.store.schema import EVENTS

PORT = 8750
"""The first that is tried."""
LOADING_AFTER = 2.0
"""Seconds until tokenizers are loaded, which takes some and holds up what is asked meanwhile; the
first question is not for tokens."""
_PORTS = 20
"""How many are tried, where none is asked for."""


def serve(directories: Sequence[Path], *, host: str = "127.0.0.1", port: int | None = None) -> None:
    """Serve pages over these runs, or over the newest in `runs`, and print their address.

    Raises:
        UserError: there is no run, or nothing can listen there.
    """
    runs = named(directories or [_newest_run()])
    token = new_token()
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


def _newest_run() -> Path:
    from rhymeflow.config.run import RUNS  # loads the whole configuration

    return newest(RUNS)


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


def new_token() -> str:
    """Nobody guesses it."""
    return secrets.token_urlsafe(16)


def address(host: str, listener: socket.socket, token: str) -> str:
    """What a browser is to open."""
    return f"http://{host}:{listener.getsockname()[1]}/?token={token}"


def newest(directory: Path) -> Path:
    """The run of this directory that was written to last.

    Raises:
        UserError: there is none.
    """
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
    """A socket that listens; of `PORT` and those that follow it the first that is free.

    Raises:
        UserError: nothing can listen there.
    """
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
