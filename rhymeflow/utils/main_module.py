"""The program's own file, which no worker runs again.

multiprocessing imports the file of `__main__` in every process that it spawns or forks from its
server. What workers run is in modules, so nothing of that file is needed there; and a script
without `if __name__ == "__main__"` would start a run in each of them.

Holds true: in the block of `left_out`, started processes do not import it.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

_lock = threading.RLock()


@contextmanager
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
