"""Starts workers' processes: forks of a server that has imported what they all need.

Importing torch and transformers takes a core three to four seconds. On Linux the server imports
them while the controller starts, with one thread, no GPU and the current environment. Elsewhere
workers are spawned and import for themselves: libraries of macOS do not survive a fork."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from typing import Any

PRELOAD = ["rhymeflow.workers.preload"]  # modules that the server imports

_SERVER: Any = forkserver._forkserver
"""`multiprocessing`'s fork server; only this file uses its private attributes."""

_READ_ON_IMPORT = (
    *("CUDA", "HF_", "HUGGINGFACE", "KMP", "LD_", "MKL", "NUMBA", "PYTHON", "PYTORCH"),
    *("TOKENIZERS", "TORCH", "TRANSFORMERS", "XDG_"),
)
"""Prefixes of environment variables that libraries read when they are imported."""

_started_with: dict[str, str] | None = None  # these variables, as the server started


def context() -> BaseContext:
    """Return the `multiprocessing` context that starts workers on this system."""
    return multiprocessing.get_context("forkserver" if can_fork() else "spawn")


def can_fork() -> bool:
    """Whether this system forks workers from a server."""
    return sys.platform == "linux"


def prepare() -> None:
    """Start the server, if any, without waiting for it; restart it if the environment changed."""
    global _started_with
    if not can_fork():
        return
    variables = {k: v for k, v in os.environ.items() if k.startswith(_READ_ON_IMPORT)}
    if _started_with not in (None, variables):
        _SERVER._stop()  # its workers continue
    _started_with = variables
    start_resource_tracker()
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    # One thread, until a worker sets its own number.
    with environment(OMP_NUM_THREADS="1"):
        forkserver.ensure_running()


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Upon Ctrl-C in the block, kill the server, so that the exit does not wait for its imports."""
    try:
        yield
    except KeyboardInterrupt:
        if _SERVER._forkserver_pid is not None:
            os.kill(_SERVER._forkserver_pid, signal.SIGKILL)
        raise


def start_resource_tracker() -> None:
    """Start the process that frees resources of killed processes, without its warnings, which would
    come after the end of the run."""
    ignored = "ignore:resource_tracker"
    known = os.environ.get("PYTHONWARNINGS")
    with environment(PYTHONWARNINGS=f"{known},{ignored}" if known else ignored):
        resource_tracker.ensure_running()


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage in the block: it would take a fifth of the time of imports."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables for processes that are started in the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
