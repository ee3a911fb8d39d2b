"""How the processes of workers begin: forked from a server that has loaded what they all need.

Importing torch and transformers takes three to four seconds of a core. On Linux the server imports
them while the controller starts, with one thread, no GPU and the present environment. Elsewhere
workers are spawned and import for themselves: libraries of macOS do not survive a fork.
"""

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

PRELOAD = ["rhymeflow.workers.preload"]
"""What the server imports."""

_SERVER: Any = forkserver._forkserver
"""`multiprocessing`'s own; only this file uses more than its interface."""

_READ_ON_IMPORT = (
    *("CUDA", "HF_", "HUGGINGFACE", "KMP", "LD_", "MKL", "NUMBA", "PYTHON", "PYTORCH"),
    *("TOKENIZERS", "TORCH", "TRANSFORMERS", "XDG_"),
)
"""How the variables begin that libraries read once."""

_started_with: dict[str, str] | None = None


def context() -> BaseContext:
    """Return what makes workers' processes on this system."""
    return multiprocessing.get_context("forkserver" if can_fork() else "spawn")


def can_fork() -> bool:
    """Whether workers are forked here."""
    return sys.platform == "linux"


def prepare() -> None:
    """Have the server load, if there is one; does not wait for it. Later calls do nothing."""
    global _started_with
    if not can_fork():
        return
    present = {k: v for k, v in os.environ.items() if k.startswith(_READ_ON_IMPORT)}
    if _started_with not in (None, present):
        _SERVER._stop()  # its workers stay
    _started_with = present
    start_resource_tracker()
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    # One thread until a worker is told how many it has.
    with environment(OMP_NUM_THREADS="1"):
        forkserver.ensure_running()


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Ctrl-C in the block kills the server, which may be loading: else all would wait for it."""
    try:
        yield
    except KeyboardInterrupt:
        if _SERVER._forkserver_pid is not None:
            os.kill(_SERVER._forkserver_pid, signal.SIGKILL)
        raise


def start_resource_tracker() -> None:
    """Start the process that frees what killed processes leave. It is silent, since its warnings
    would come after the end."""
    ignored = "ignore:resource_tracker"
    known = os.environ.get("PYTHONWARNINGS")
    with environment(PYTHONWARNINGS=f"{known},{ignored}" if known else ignored):
        resource_tracker.ensure_running()


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage in the block, which would take a fifth of the time of importing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set variables for the processes that are started in the block."""
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
