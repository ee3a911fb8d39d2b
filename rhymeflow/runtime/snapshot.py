"""Writes the coordinator's state as bytes, so that a resume need not replay the whole log.

Pickle keeps the state exactly. Reading allows only the coordinator's classes and plain containers,
so a run directory cannot run code. Two digests come first: of the fields of these classes, which
pickle does not check, and of the bytes."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import io
import pickle
import pkgutil
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

from rhymeflow import core
from rhymeflow.core.commands import Train
from rhymeflow.core.state import State

_ALLOWED = {("builtins", name) for name in ("set", "frozenset")}
_ALLOWED |= {("collections", name) for name in ("deque", "defaultdict", "OrderedDict")}


class StateSnapshot(NamedTuple):
    """The result of a replay up to an event."""

    state: State  # without its plan and schedule; see `State.restore`
    num_drawn: int  # see `resume.Past`
    training: Train | None


def write(snapshot: StateSnapshot) -> bytes:
    """Return the snapshot as bytes."""
    state = pickle.dumps(tuple(snapshot), protocol=5)
    return digest_of_classes() + _digest(state) + state


def read(blob: bytes) -> StateSnapshot | None:
    """Return what `write` was given; None: it is damaged, or the coordinator's classes have
    changed. Raises `pickle.UnpicklingError` if it holds other classes."""
    classes = digest_of_classes()
    digest, state = blob[len(classes) : 2 * len(classes)], blob[2 * len(classes) :]
    if not blob.startswith(classes) or digest != _digest(state):
        return None
    return StateSnapshot(*_Reader(io.BytesIO(state)).load())


@cache
def digest_of_classes() -> bytes:
    """Return 16 bytes that change with the fields of any class of the coordinator."""
    names = sorted(m.name for m in pkgutil.walk_packages(core.__path__, f"{core.__name__}."))
    classes = [
        member
        for name in names
        for _, member in inspect.getmembers(importlib.import_module(name), inspect.isclass)
        if member.__module__ == name
    ]
    text = "\n".join(f"{c.__module__}.{c.__qualname__} {' '.join(_fields(c))}" for c in classes)
    return _digest(text.encode())


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _fields(cls: type) -> Iterator[str]:
    """Yield the names of a class's fields, with their types where these are declared."""
    if issubclass(cls, Enum):
        yield from cls.__members__
    elif is_dataclass(cls) or issubclass(cls, tuple):
        yield from (f"{name}:{kind}" for name, kind in inspect.get_annotations(cls).items())
    elif inspect.isfunction(init := vars(cls).get("__init__")):
        yield from init.__code__.co_names


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("rhymeflow.core.") or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a coordinator's state")
