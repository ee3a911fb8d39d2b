"""Processes that run a user's code: they end together, and none runs the program's own file.

multiprocessing imports the file of `__main__` in every process that it spawns or forks from its
server. What workers run is in modules, so nothing of that file is needed there; and a script
without `if __name__ == "__main__"` would start a run in each of them.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from rhymeflow.errors import UserError

START_SECONDS = 600.0
"""That a process may take to import a user's code."""
_PR_SET_PDEATHSIG = 1  # prctl(2)
_lock = threading.RLock()


def how_it_ended(exitcode: int | None) -> str:
    """Say how a process came to its end, in brackets."""
    if exitcode is not None and exitcode < 0:
        return f"(killed by {signal.Signals(-exitcode).name})"
    return f"(exit code {exitcode})"


def apart(function: Callable[..., Any], argument: Any, names: Iterable[str]) -> Any:
    """Return `function(argument)`, of a module's function.

    Raises:
        UserError: the process ended; `names` are what it may have imported.
    """
    context = multiprocessing.get_context("spawn")
    as_any_program = multiprocessing.set_start_method, (None, True)  # for the user's processes
    try:
        with ProcessPoolExecutor(1, context, *as_any_program) as pool:
            with left_out():
                asked = pool.submit(function, argument)
            return asked.result(START_SECONDS)
    except BrokenProcessPool:
        raise UserError(f"{', '.join(names)}: importing them ended the process") from None


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Start processes that do not import the program's own file."""
    with _lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def guarded_file() -> Path | None:
    """The program's own file, if importing it runs no more than its definitions: where it has a
    block for `__name__ == "__main__"`."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return Path(file).resolve() if file and _is_guarded(file) else None


@cache
def _is_guarded(file: str) -> bool:
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    return any(isinstance(each, ast.If) and _asks_for_main(each.test) for each in tree.body)


def _asks_for_main(test: ast.expr) -> bool:
    parts = list(ast.walk(test))
    names = any(isinstance(each, ast.Name) and each.id == "__name__" for each in parts)
    return names and any(isinstance(e, ast.Constant) and e.value == "__main__" for e in parts)


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
    """Make this process leave Ctrl-C to its parent, lead a group of its own, and end with it, even
    inside a call that never returns; however it ends, its group ends with it (Linux).

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
