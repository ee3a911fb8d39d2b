"""Imports user functions and objects: `path/to/file.py:function`, dotted, or `objects.pickle:name`.

A file becomes a module whose name contains its path, so that its objects can be sent to processes
that user code starts, and files of the same name are different modules. A `.pickle` has objects of
a Trainer that are in no module. If an object cannot be imported, also because the user's file
raised, a `UserError` says why in one line that begins with `where`."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pickle
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location, spec_from_loader
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from rhymeflow.errors import UserError, nearest, suggestion
from rhymeflow.utils.user_values import described

Rule = TypeVar("Rule", bound=Callable[..., Any])

__path__: list[str] = []  # marks this module as a package; `_Finder` finds its submodules


def name_of_file(path: Path) -> str:
    """Return the module name of the file at an absolute path."""
    escaped = re.sub("[^A-Za-z0-9]", lambda match: f"_{ord(match[0]):x}_", str(path))
    return f"{__name__}.{escaped}"


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        escaped = fullname.removeprefix(f"{__name__}.")
        file = Path(re.sub("_([0-9a-f]+)_", lambda match: chr(int(match[1], 16)), escaped))
        if file.suffix == ".pickle":
            return spec_from_loader(fullname, _PickleLoader(file))
        return spec_from_file_location(fullname, file)


class _PickleLoader(Loader):
    def __init__(self, path: Path) -> None:
        self._path = path

    def exec_module(self, module: ModuleType) -> None:
        """Read the file's `__objects__`. Functions and classes of the writer's `__main__` that they
        use become members of this module, so that they can be sent to other processes."""
        directories, data = pickle.loads(self._path.read_bytes())
        sys.path += [each for each in directories if each not in sys.path]
        objects, main = pickle.loads(data)
        for each in (*objects.values(), *map(type, objects.values()), *main.__globals__.values()):
            name = getattr(each, "__qualname__", "")
            if getattr(each, "__module__", None) == "__main__" and name.isidentifier():
                each.__module__ = module.__name__
                setattr(module, name, each)
        vars(module)["__objects__"] = objects


sys.meta_path.append(_Finder())


def names_pickle(spec: str) -> bool:
    """Whether `spec` names an object in a `.pickle` file."""
    return ".pickle:" in spec


def dumped(objects: Mapping[str, Any]) -> bytes:
    """Pickle objects with everything that they refer to; functions of modules are pickled by name.
    Raises `UserError` if one of them contains an object that cannot leave this process."""
    for name, each in objects.items():
        _dumped(each, name)  # alone, so that the error names it
    # Objects that are pickled together share the globals that they use, and `main` brings them.
    main = FunctionType(_no_code.__code__, vars(sys.modules["__main__"]))
    return _dumped((sys.path, _dumped((dict(objects), main), ", ".join(objects))), "sys.path")


def _no_code() -> None:
    pass


def unpickled(spec: str, where: str) -> Any:
    """Return the object that `spec` names; `where` begins each error message. Raises `UserError` if
    there is no such file or object, or reading it raised."""
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise UserError(f"{where}: there is no file {path}")
    try:
        objects = importlib.import_module(name_of_file(path)).__objects__
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it runs the user's code
        raise UserError(f"{where}: reading it raised {described(error)}") from None
    if name not in objects:
        raise UserError(f"{where}: there is no {name!r} in it{nearest(name, objects)}")
    return objects[name]


def _dumped(value: Any, name: str) -> bytes:
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - `__reduce__` of the user's objects may raise anything
        raise UserError(
            f"Trainer: {name} cannot be carried to another process: {error}; make what it needs "
            "inside of it, or write it into a .py file of its own, which is imported there"
        ) from None
    return data


def imported(spec: str, where: str) -> Callable[..., Any]:
    """Return the function that `spec` names; `where` begins each error message. Raises `UserError`
    if file, module or function is missing, the object is no function, or importing it raised."""
    if names_pickle(spec):
        return _callable(unpickled(spec, where), where)
    if names_file(spec):
        path, name = _parts(spec, where)
        module = _file_module(Path(path), where)
    else:
        path, _, name = spec.rpartition(".")
        if not path or "/" in spec:
            raise UserError(f"{where}: give path/to/file.py:function, or a dotted name")
        module = _named_module(path, where)
    return function_of(module, name, where)


def names_file(spec: str) -> bool:
    """Whether `spec` names a function in a file, and not in a module."""
    return ".py:" in spec or spec.endswith(".py")


def check_file(spec: str, where: str) -> None:
    """Check, without running the file, that `path/to/file.py:function` names a function. Raises
    `UserError` if there is no such file, it is not Python, or it does not define the name."""
    path, name = _parts(spec, where)
    names = _defined(Path(path).expanduser(), where)
    if names is not None and name not in names:
        raise UserError(f"{where}: there is no {name!r} in it{nearest(name, names)}")


def _parts(spec: str, where: str) -> tuple[str, str]:
    """Split a spec into file and function name."""
    file, _, name = spec.rpartition(":") if ".py:" in spec else (spec, "", "")
    if name:
        return file, name
    file = spec.rstrip(":")
    path = Path(file).expanduser()
    names = (_defined(path, where) or {}) if path.is_file() else {}
    functions = sorted(name for name, is_function in names.items() if is_function)
    known = f" (it has {', '.join(functions[:5])})" if functions else ""
    example = f"{file}:{(functions or ['function'])[0]}"
    raise UserError(f"{where}: name the function too, as in {example}{known}")


def _defined(path: Path, where: str) -> dict[str, bool] | None:
    """Return the names at the top level of a file, and whether each is a public function; None if
    they are known only at run time."""
    if not path.is_file():
        raise UserError(f"{where}: there is no file {path.resolve()}")
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        place = f" ({path.name}:{line})" if line else ""
        text = getattr(error, "msg", error)
        raise UserError(f"{where}: is not Python: {type(error).__name__}: {text}{place}") from None
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
            case _:  # a condition, a loop: its definitions are known only at run time
                return None
    return None if "*" in names else names


def function_of(module: ModuleType, name: str, where: str) -> Callable[..., Any]:
    """Return the module's function of this name. Raises `UserError` if it has none."""
    function = getattr(module, name, None)
    if function is None:
        known = [each for each, value in vars(module).items() if inspect.isroutine(value)]
        raise UserError(f"{where}: there is no {name!r} in it{nearest(name, known)}")
    return _callable(function, where)


def _callable(value: Any, where: str) -> Callable[..., Any]:
    if not callable(value):
        raise UserError(f"{where}: is a {type(value).__name__}, not a function")
    return value


def _file_module(path: Path, where: str) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"{where}: there is no file {path}")
    name = name_of_file(path)
    if name not in sys.modules:
        sys.path.insert(0, str(path.parent))  # for imports of its neighbours
    return _named_module(name, where)


def _named_module(name: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise UserError(f"{where}: {error}") from None
        raise UserError(f"{where}: importing it raised {described(error)}") from None


def named_or_own(where: str, given: str | None, known: Mapping[str, Rule], arguments: str) -> Rule:
    """Return the rule of this name, or the user's function, which must take these arguments; field
    `where` has it. Raises `UserError` if there is none, or the function cannot be used as one."""
    assert given is not None
    if given in known:
        return known[given]
    if "." not in given.strip("."):
        raise UserError(
            f"{where}: given {json.dumps(given)}, allowed: {', '.join(known)}, or a function of "
            f"your own, path/to/file.py:function or dotted{suggestion(given, known)}"
        )
    where = f"{where}: {given}"
    function = imported(given, where)
    if _is_standard_library(function):
        raise UserError(f"{where}: comes with Python, and is no rule")
    try:
        inspect.signature(function).bind(*arguments.split(", "))
    except TypeError as error:
        raise UserError(f"{where}: cannot be called as f({arguments}): {error}") from None
    except ValueError:  # some built-ins have no signature
        raise UserError(f"{where}: does not say that it takes ({arguments})") from None
    return function  # type: ignore[return-value]


def _is_standard_library(function: Callable[..., Any]) -> bool:
    """Whether a function, like `os.system`, is Python's and not a rule that the user wrote."""
    if not (inspect.isroutine(function) or inspect.isclass(function)):
        return False  # a `partial` of the user's function
    return (function.__module__ or "").partition(".")[0] in sys.stdlib_module_names
