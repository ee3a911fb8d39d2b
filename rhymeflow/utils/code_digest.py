"""Digests of a user's code: of files, of modules, and of functions that are in none.

A digest says whether a resumed run calls other code. What code imports is not looked at; of a
function that is carried by value, what it refers to is: helpers beside it, values that it holds."""

from __future__ import annotations

import re
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import xxhash

DIGESTS = "objects.json"  # beside a file of objects, by their names


def digest_of_file(path: str | Path) -> str:
    """Return the digest of a file's content."""
    return xxhash.xxh3_128(Path(path).read_bytes()).hexdigest()


def file_of_module(name: str) -> str | None:
    """Return the file of a module by its dotted name, without importing anything; None if there is
    none."""
    path, spec = None, None
    for end in (match.start() for match in re.finditer(r"\.|$", name)):
        spec = PathFinder.find_spec(name[:end], path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec.origin if spec is not None and spec.has_location else None


def digest_of_object(given: Any) -> str:
    """Return the digest of a function, class or object that is carried by value; another process
    that has the same returns the same."""
    try:
        content = repr(_content(given, {}))
    except RecursionError:  # values nested a thousand deep, of which nothing is said
        content = ""
    return xxhash.xxh3_128(content.encode()).hexdigest()


def _content(value: Any, seen: dict[int, tuple[int, Any]]) -> Any:
    """Return what `value` is made of, as something whose `repr` says it all."""
    if isinstance(value, str | bytes | int | float | None):
        return value
    if id(value) in seen:
        return seen[id(value)][0]
    seen[id(value)] = len(seen), value
    each = partial(_content, seen=seen)
    match value:
        case dict():
            return [(each(name), each(x)) for name, x in value.items()]
        case list() | tuple():
            return [*map(each, value)]
        case set() | frozenset():
            return sorted(map(repr, value))
        case ModuleType() | FunctionType() | type() if not _is_carried(value):
            return value.__name__
    if (parts := _parts(value)) is not None:
        return each(parts)
    says_nothing = repr(value) == object.__repr__(value)
    held = each(getattr(value, "__dict__", None)) if says_nothing else None
    whole = value.tolist() if hasattr(value, "tolist") else value  # `repr` cuts arrays
    text = repr((type(value), whole, held))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _parts(value: Any) -> list[Any] | None:
    """Return what code, or an object of a carried class, consists of; None: of other values."""
    match value:
        case CodeType():
            return [value.co_code, value.co_names, value.co_consts]
        case FunctionType():
            used = sorted(value.__globals__.keys() & _names(value.__code__))
            held = [*map(_held, value.__closure__ or ())]
            defaults = value.__defaults__, value.__kwdefaults__
            return [value.__code__, *defaults, held, *map(value.__globals__.get, used)]
        case type():
            own = vars(value).items()
            return [value.__bases__, {n: x for n, x in own if n[:2] != "__" or callable(x)}]
        case MethodType() | staticmethod() | classmethod():
            return [value.__func__, getattr(value, "__self__", None)]
        case property():
            return [value.fget]
        case partial():
            return [value.func, value.args, value.keywords]
    if (wrapped := getattr(value, "__wrapped__", None)) is not None:  # as by `lru_cache`
        return [wrapped]
    is_carried = _is_carried(type(value))
    return [type(value), getattr(value, "__dict__", None)] if is_carried else None


def _held(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a name that is given a value later
        return None


def _is_carried(value: Any) -> bool:
    """Whether a function or class is in no module that another process can import."""
    name = getattr(value, "__qualname__", "")  # a module has none
    return bool(name) and (value.__module__ == "__main__" or "<" in name)


def _names(code: CodeType) -> set[str]:
    """Return the names that code and functions in it use."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names}.union(*inner)
