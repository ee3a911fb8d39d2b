"""Starts processes for user code, which end with their parent and do not import its main file.

multiprocessing imports the file of `__main__` in every process that it spawns or forks from its
server. Workers run functions of modules and do not need that file, and a script without
`if __name__ == "__main__"` would start a run in each of them."""

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
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from rhymeflow.errors import UserError

START_SECONDS = 600.0  # longest time for a process to import user code
_PR_SET_PDEATHSIG = 1  # prctl(2)
_lock = threading.RLock()


def how_it_ended(exitcode: int | None) -> str:
    """Return how a process ended, such as `(exit code 1)`."""
    if exitcode is not None and exitcode < 0:
        return f"(killed by {signal.Signals(-exitcode).name})"
    return f"(exit code {exitcode})"


def call_in_process(function: Callable[..., Any], argument: Any, names: Iterable[str]) -> Any:
    """Return `function(argument)`, called in another process; `function` must be in a module.
    Raises `UserError` if that process ends early; the message lists `names`, what it imports."""
    context = multiprocessing.get_context("spawn")
    reset = partial(multiprocessing.set_start_method, None, force=True)  # for the user's processes
    try:
        with ProcessPoolExecutor(1, context, initializer=reset) as pool:
            with without_main_file():
                future = pool.submit(function, argument)
            return future.result(START_SECONDS)
    except BrokenProcessPool:
        raise UserError(f"{', '.join(names)}: importing them ended the process") from None


@contextlib.contextmanager
def without_main_file() -> Iterator[None]:
    """Make processes that start in the block not import the program's main file."""
    with _lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def guarded_file(name: str) -> Path | None:
    """Return the program's main file if importing it runs only its definitions, `name` among them:
    it has a block for `__name__ == "__main__"`, which does not define `name`. Else None."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if not file:
        return None
    guarded = _names_guarded(file)
    return None if guarded is None or name in guarded else Path(file).resolve()


@cache
def _names_guarded(file: str) -> frozenset[str] | None:
    """Return the functions and classes that the block for `__main__` defines; None without one."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    blocks = [each for each in tree.body if isinstance(each, ast.If) and _tests_for_main(each.test)]
    inside = (each for block in blocks for each in ast.walk(block))
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    names = frozenset(each.name for each in inside if isinstance(each, kinds))
    return names if blocks else None


def _tests_for_main(test: ast.expr) -> bool:
    parts = list(ast.walk(test))
    has_name = any(isinstance(each, ast.Name) and each.id == "__name__" for each in parts)
    return has_name and any(isinstance(e, ast.Constant) and e.value == "__main__" for e in parts)


def descendants(ancestor: int) -> list[int]:
    """Return the process ids of all descendants of `ancestor`, as far as /proc lists them."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    family, i = [ancestor], 0
    while i < len(family):
        family += children.get(family[i], [])
        i += 1
    return family[1:]


def detach(parent: int) -> None:
    """Make this process ignore Ctrl-C, lead a new process group, and end with its parent, even
    inside a call that never returns. Its group ends with it, however it ends (Linux). It also
    resets multiprocessing's start method for the processes that this one starts."""
    multiprocessing.set_start_method(None, force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"  # the children are the parallelism
    if sys.platform == "linux":
        # A closed pipe would only be noticed between calls.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit()  # the parent died before the line above
        _guard()


def _guard() -> None:
    """Start a process that kills this one's group when this one ends for any reason. It is not a
    child of this process, because user code may wait for all children, and it has none of this
    process's files open."""
    guarded = os.getpid()
    try:
        ended = os.pidfd_open(guarded)  # readable once that process has ended
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
                with contextlib.suppress(OSError):  # the descriptor of the listing itself
                    os.close(descriptor)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.poll()
    finally:
        os.killpg(guarded, signal.SIGKILL)  # this process is in it
