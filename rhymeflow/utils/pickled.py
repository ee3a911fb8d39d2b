"""Objects that are in no module: written down by value, and read in another process.

`path/to/objects.pickle:name` names one. A file has a trainer's objects together, so that what they
share (the object that two methods are of) they share there too.

Holds true: what cannot be written or read is a `UserError` that says why; a file is read once in a
process, with the directories on the path that its writer had. Only what the user's own program
wrote is read: a pickle is a program. Knows nothing of what the objects are for.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rhymeflow.errors import UserError, nearest
from rhymeflow.utils.described import described

_read: dict[Path, dict[str, Any]] = {}


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
    return _dumped((sys.path, _dumped(dict(objects), ", ".join(objects))), "sys.path")


def unpickled(spec: str, where: str) -> Any:
    """Return the object that `spec` names; `where` begins each error message.

    Raises:
        UserError: there is no such file or object, or reading it raised.
    """
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser().resolve()
    if path not in _read:
        _read[path] = _loaded(path, where)
    if name not in _read[path]:
        raise UserError(f"{where}: there is no {name!r} in it{nearest(name, _read[path])}")
    return _read[path][name]


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


def _loaded(path: Path, where: str) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{where}: there is no file {path}")
    try:
        directories, data = pickle.loads(path.read_bytes())
        sys.path += [each for each in directories if each not in sys.path]
        objects: dict[str, Any] = pickle.loads(data)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it runs the user's code
        raise UserError(f"{where}: reading it raised {described(error)}") from None
    return objects
