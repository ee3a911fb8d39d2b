"""A process that runs a user's code, and those that it starts, end together.

A child that called `detach` dies with its parent, even inside a call that never returns, and
however it ends, its process group ends with it (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import select
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)


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
