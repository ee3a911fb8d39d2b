"""Whether another process can import what a user hands in, and under which name.

Holds true: a name that is given imports the very object; nothing of the program's own file is named
unless importing it again runs its definitions only. Knows nothing of what objects are for.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rhymeflow.utils import main_module


def name_of(given: Callable[..., Any]) -> str | None:
    """Name a function or a class, `module.name` or `path/to/file.py:name`; None: it has to go by
    value, since it is a lambda, a closure, a method, an object, or typed into a prompt."""
    name = getattr(given, "__qualname__", "")
    is_named = inspect.isroutine(given) or inspect.isclass(given)
    if not is_named or not name.isidentifier():
        return None
    module = sys.modules.get(getattr(given, "__module__", None) or "")
    if module is None or getattr(module, name, None) is not given:
        return None
    if module.__name__ == "__main__":
        file = main_module.guarded_file()
        return None if file is None else f"{file}:{name}"
    path = getattr(module, "__file__", None)
    in_package = "." in module.__name__ or (path is not None and Path(path).stem == "__init__")
    if in_package or path is None or Path(path).suffix != ".py":  # it may import its neighbours
        return f"{module.__name__}.{name}"
    return f"{Path(path).resolve()}:{name}"


def title_of(given: Any) -> str:
    """What to call it in metrics: its name, that of its class, or `lambda`."""
    while hasattr(given, "func") and not hasattr(given, "__name__"):  # of a functools.partial
        given = given.func
    name = getattr(given, "__name__", type(given).__name__)
    return str(name).strip("<>").replace(".", "_").replace(":", "_")


__all__ = ["name_of", "title_of"]
