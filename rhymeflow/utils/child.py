"""A process that runs a user's code, and its end: detached, guarded, killed with all it started.

Holds true: a killed child is gone, with every process it started, when `kill` returns; a child
that called `detach` dies with its parent, even inside a call that never returns, and however it
ends, its process group ends with it (Linux). Knows nothing of what is said to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rhymeflow.utils import main_module

_PR_SET_PDEATHSIG = 1  # prctl(2)


class Child:
    """A spawned process that runs `target(connection, parent, *arguments)`.

    `parent` is this process's id, for `detach`; the other end of the pipe is `connection`.
    """

    def __init__(self, target: Callable[..., None], arguments: tuple[Any, ...], name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe(duplex=True)
        # Not a daemon: user code may start processes of its own.
        self._process = context.Process(
            target=target, args=(theirs, os.getpid(), *arguments), name=name, daemon=False
        )
        with main_module.left_out():
            self._process.start()
        theirs.close()  # so that the end of the child is the end of the pipe

    @property
    def pid(self) -> int:
        """Process id, and id of the process group it leads."""
        assert self._process.pid is not None
        return self._process.pid

    def how_it_ended(self) -> str:
        """Say how a child that closed its pipe came to its end."""
        self._process.join(timeout=5)  # the pipe closes a little before the process is gone
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"

    def kill(self) -> None:
        """End the process and those it started, also in sessions of their own, at once."""
        for pid in descendants(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # nobody is left in its group, or none yet
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()


def descendants(ancestor: int) -> list[int]:
    """The processes that `ancestor` and these started, as far as the system tells (Linux)."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, i = [ancestor], 0
    while i < len(found):
        found += children.get(found[i], [])
        i += 1
    return found[1:]


def detach(parent: int) -> None:
    """Make this process leave Ctrl-C to its parent, lead a group of its own, and end with it.

    Processes that it starts are started as any program's are, not as this one was.
    """
    multiprocessing.set_start_method(None, force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"  # the parallelism is that of the children
    if sys.platform == "linux":
        # The pipe's end is only seen between calls.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit()  # it died before the line above
        _guard()


def _guard() -> None:
    """Start a process that kills this one's group when this one ends, however that comes about.

    It is no child of this one (user code may wait for all it has), and holds none of its files.
    """
    guarded = os.getpid()
    try:
        ended = os.pidfd_open(guarded)
    except OSError:  # before Linux 5.3; the parent still kills the group when it ends a child
        return
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        os.close(ended)
        return
    if os.fork():
        os._exit(0)
    try:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor != ended:
                with contextlib.suppress(OSError):  # that of the list itself
                    os.close(descriptor)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.poll()
    finally:
        os.killpg(guarded, signal.SIGKILL)  # this process is in it
