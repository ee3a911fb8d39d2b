"""Serves the dashboard: `rhymeflow dashboard` until Ctrl-C, `train --dashboard` beside its run, and
in a terminal after it until Ctrl-C.

It listens on this machine only, unless `--host` names another address. The address to open contains
a token that is random at each start."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context, parent_process
from pathlib import Path

import uvicorn

from rhymeflow.dashboard.run import Run
from rhymeflow.dashboard.server import LOOPBACK, make_app
from rhymeflow.errors import RunError, UserError
from rhymeflow.observe.query import TokenTexts, short_names
from rhymeflow.store.schema import EVENTS

HERE = "127.0.0.1"
PORT = 8750
LOADING_AFTER = 2.0
"""Seconds until tokenizers are loaded, which delays requests; the first ones need no tokens."""
_PORTS = 20
_NICENESS = 10  # niceness of a dashboard beside a run, so that the run gets the cores first
_POLL_SECONDS = 0.2
_PATIENCE = 5.0  # seconds after which a process that does not end is killed


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
    """Return a server of pages for these runs; `hosts` as for `make_app`."""
    texts = TokenTexts()

    def load() -> None:
        for run in runs:
            with contextlib.suppress(UserError), run.reader() as reader:  # requests report it
                texts.of(reader, [])

    loading = threading.Timer(LOADING_AFTER, load)
    loading.daemon = True
    loading.start()
    app = make_app(runs, texts, token=token, hosts=hosts)
    return uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))


def address(host: str, listener: socket.socket, token: str) -> str:
    """Return the URL to open in a browser."""
    return f"http://{host}:{listener.getsockname()[1]}/?token={token}"


def newest(directory: Path) -> Path:
    """Return the run in this directory that was written last. Raises `UserError` without any."""
    run_dirs = [path.parent for path in directory.glob(f"*/{EVENTS}")]
    if not run_dirs:
        raise UserError(f"{directory}: has no run; name a run directory")
    return max(run_dirs, key=lambda run: (run / EVENTS).stat().st_mtime)


def named(directories: Sequence[Path]) -> list[Run]:
    """Return the runs, named by the shortest ends of their paths that are different."""
    paths = list(dict.fromkeys(directory.resolve() for directory in directories))
    names = short_names(paths)
    return [Run(path, name.replace("/", "-")) for path, name in zip(paths, names, strict=True)]


def listening(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens at `port`, or at the first free port from `PORT` on. Raises
    `UserError` if nothing can listen there."""
    for number in [port] if port is not None else range(PORT, PORT + _PORTS):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio sets TCP_NODELAY only on a socket whose protocol is TCP; without it the
        # body of a response waits 40 ms for the acknowledgement of its headers.
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
    """Serve pages over the run that begins in `run_dir`, in another process, until the block ends,
    and in a terminal until Ctrl-C after that. Yields their URL, which a browser may open before the
    process is up. Raises `UserError` if no port is free."""
    token = secrets.token_urlsafe(16)
    with contextlib.closing(listening(HERE, None)) as listener:
        process = get_context("spawn").Process(
            target=_serve_beside, args=(run_dir, listener, token), daemon=True
        )
        # Ctrl-C in the terminal is for the run: the process starts with it blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        url = address(HERE, listener, token)
    try:
        yield url
        _stay(url, run_dir, "the run has ended")
    except (UserError, RunError) as error:
        _stay(url, run_dir, f"the run has stopped: {error}")
        raise
    finally:
        process.terminate()
        process.join(_PATIENCE)
        process.kill()
        process.join()


def _stay(url: str, run_dir: Path, how: str) -> None:
    """Go on until Ctrl-C, where somebody is at a terminal and there is something to look at."""
    if sys.stdout.isatty() and (run_dir / EVENTS).is_file():
        print(f"{how}; the dashboard stays at {url} until Ctrl-C", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


def _serve_beside(run_dir: Path, listener: socket.socket, token: str) -> None:
    """Serve until SIGTERM, or until the run's process has ended."""
    os.nice(_NICENESS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while not (run_dir / EVENTS).is_file():
        time.sleep(_POLL_SECONDS)
    server_of([Run(run_dir, run_dir.name)], token).run(sockets=[listener])


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    signal.raise_signal(signal.SIGTERM)
