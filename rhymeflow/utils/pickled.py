"""Objects that are in no module: written down by value, and read in another process.

`path/to/objects.pickle:name` names one. A file has a trainer's objects together, so that what they
share (the object that two methods are of) they share there too.

Holds true: what cannot be written or read is a `UserError` that says why; a file is read once in a
process, with the directories on the path that its writer had. Only what the user's own program
wrote is read: a pickle is a program. Knows nothing of what the objects are for.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from rhymeflow.errors import UserError, nearest
from rhymeflow.utils.described import described
from rhymeflow.utils.user_modules import name_of_file


def names_pickle(spec: str) -> bool:
    """Whether `spec` means an object in such a file."""
    return ".pickle:" in spec


def dumped(objects: Mapping[str, Any]) -> bytes:
    """Write objects by value, with what they refer to; functions of modules stay names.

    Raises:
        UserError: one of them holds something that is of this process only.
    """
    for name, each in objects.items():
        _dumped(each, name)  # alone, so that the error names it
    # What is pickled together shares the names of `__main__` that it uses; this has them too.
    main = FunctionType(_no_code.__code__, vars(sys.modules["__main__"]))
    return _dumped((sys.path, _dumped((dict(objects), main), ", ".join(objects))), "sys.path")


def _no_code() -> None:
    pass


def unpickled(spec: str, where: str) -> Any:
    """Return the object that `spec` names; `where` begins each error message.

    Raises:
        UserError: there is no such file or object, or reading it raised.
    """
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


def load_into(module: ModuleType, path: Path) -> None:
    """Make the module of such a file: its `__objects__`, and what they use of their writer's
    `__main__`, which belongs to this module from now on, so that processes can be sent it."""
    directories, data = pickle.loads(path.read_bytes())
    sys.path += [each for each in directories if each not in sys.path]
    objects, main = pickle.loads(data)
    for each in (*objects.values(), *map(type, objects.values()), *main.__globals__.values()):
        name = getattr(each, "__qualname__", "")
        if getattr(each, "__module__", None) == "__main__" and name.isidentifier():
            each.__module__ = module.__name__
            setattr(module, name, each)
    vars(module)["__objects__"] = objects
