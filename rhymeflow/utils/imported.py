"""Functions of the user's, by name: `path/to/file.py:function`, dotted, or in a trainer's pickle.

Holds true: whatever cannot be had is a `UserError` in one line that begins with `where` and says
why, also if the user's file itself raised; a file is imported once, under a name of its own, with
its directory on the path. Knows nothing of what the functions are for.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rhymeflow.errors import UserError, nearest
from rhymeflow.utils.described import described
from rhymeflow.utils.pickled import names_pickle, unpickled
from rhymeflow.utils.user_modules import name_of_file


def imported(spec: str, where: str) -> Callable[..., Any]:
    """Return the function that `spec` names; `where` begins each error message.

    Raises:
        UserError: the file, the module or the function is not there, is no function, or importing
            it raised.
    """
    if names_pickle(spec):
        found = unpickled(spec, where)
        if not callable(found):
            raise UserError(f"{where}: is a {type(found).__name__}, not a function")
        return found  # type: ignore[no-any-return]
    if names_file(spec):
        path, _, name = spec.rpartition(":") if ".py:" in spec else (spec, "", "")
        if not name:
            raise UserError(_no_function(spec, where))
        module = _file_module(Path(path), where)
    else:
        path, _, name = spec.rpartition(".")
        if not path or "/" in spec:
            raise UserError(f"{where}: give path/to/file.py:function, or a dotted name")
        module = _named_module(path, where)
    return function_of(module, name, where)


def names_file(spec: str) -> bool:
    """Whether `spec` means a function of a file, and not of a module."""
    return ".py:" in spec or spec.endswith(".py")


def check_file(spec: str, where: str) -> None:
    """Look whether the file of `path/to/file.py:function` has such a function; runs nothing of it.

    Raises:
        UserError: there is no such file, it is no Python, or it does not define the name.
    """
    path, _, name = spec.rpartition(":") if ".py:" in spec else (spec, "", "")
    if not name:
        raise UserError(_no_function(spec, where))
    names = _defined(Path(path).expanduser(), where)
    if names is not None and name not in names:
        raise UserError(f"{where}: there is no {name!r} in it{nearest(name, names)}")


def _no_function(spec: str, where: str) -> str:
    spec = spec.rstrip(":")
    path = Path(spec).expanduser()
    names = (_defined(path, where) or {}) if path.is_file() else {}
    functions = sorted(name for name, is_function in names.items() if is_function)
    there = f" (it has {', '.join(functions[:5])})" if functions else ""
    return f"{where}: name the function too, as in {spec}:{(functions or ['function'])[0]}{there}"


def _defined(path: Path, where: str) -> dict[str, bool] | None:
    """Names at the top of a file, and whether each is a function; None if that cannot be said."""
    if not path.is_file():
        raise UserError(f"{where}: there is no file {path.resolve()}")
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        place = f" ({path.name}:{line})" if line else ""
        text = getattr(error, "msg", error)
        raise UserError(f"{where}: is no Python: {type(error).__name__}: {text}{place}") from None
    names: dict[str, bool] = {}
    for each in tree.body:
        match each:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names[name] = not name.startswith("_")
            case ast.ClassDef(name=name):
                names[name] = False
            case ast.Assign() | ast.AnnAssign():
                names |= {n.id: False for n in ast.walk(each) if isinstance(n, ast.Name)}
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {(a.asname or a.name).partition(".")[0]: False for a in aliases}
            case ast.Expr():
                pass
            case _:  # a condition, a loop: what it defines is known when it has run
                return None
    return None if "*" in names else names


def function_of(module: ModuleType, name: str, where: str) -> Callable[..., Any]:
    """Return the module's function of this name; `UserError` if it has none."""
    function = getattr(module, name, None)
    if function is None:
        known = [each for each, value in vars(module).items() if inspect.isroutine(value)]
        raise UserError(f"{where}: there is no {name!r} in it{nearest(name, known)}")
    if not callable(function):
        raise UserError(f"{where}: is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def _file_module(path: Path, where: str) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"{where}: there is no file {path}")
    name = name_of_file(path)
    if name not in sys.modules:
        sys.path.insert(0, str(path.parent))  # for its neighbours
    return _named_module(name, where)


def _named_module(name: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise UserError(f"{where}: {error}") from None
        raise UserError(f"{where}: importing it raised {described(error)}") from None
