"""Reads and writes YAML by the core rules of version 1.2.

Holds true: `1e-6` is a number, `on` and `no` are words, dates are text, a key is a name and stands
once; what `write` writes, `construct(compose(...))` reads back equal. Each mistake is one
`UserError` line with file, line and column. Knows nothing of configurations.

PyYAML by itself follows version 1.1, where `1e-6` is text and `off` is false.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from rhymeflow.errors import UserError

_PREFIX = "tag:yaml.org,2002:"

DEEPEST = 50
"""Levels that lists and mappings may be nested to; Python's recursion ends at a few hundred."""

LONGEST_INTEGER = 100
"""Characters of an integer; Python refuses to read or write those of some thousand digits."""

_SCALARS = (
    ("null", r"(?:~|null|Null|NULL|)", [*"~nN", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)", [*"tTfF"]),
    ("int", r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)", [*"-+0123456789"]),
    (
        "float",
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))",
        [*"-+.0123456789"],
    ),
)
"""Kind, pattern and possible first characters of what is not text; the first match counts."""


def compose(text: str, where: str) -> yaml.Node | None:
    """Return the text's tree with its line numbers; None for an empty text."""
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except yaml.YAMLError as error:
        raise _user_error(error, where) from None
    finally:
        if loader is not None:
            loader.dispose()


def construct(node: yaml.Node, where: str) -> Any:
    """Return the tree's values: dicts with text keys, lists, text, numbers, booleans, None."""
    try:
        return _Loader("").construct_document(node)
    except yaml.YAMLError as error:
        raise _user_error(error, where) from None


def write(values: Any) -> str:
    """Return nested dicts, lists and scalars as YAML, in the order given."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """Plain scalars, sequences and mappings, nothing else."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.depth > DEEPEST:
            problem = f"nested more than {DEEPEST} levels deep"
            raise yaml.composer.ComposerError(None, None, problem, self.peek_event().start_mark)
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes exactly what `_Loader` would not read as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.Node:
    # Between plain or single quotes these are line breaks, and would be read back as such.
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029") else None
    return dumper.represent_scalar(f"{_PREFIX}str", text, style=style)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    if len(node.value) > LONGEST_INTEGER:
        problem = f"an integer of {len(node.value):,} characters"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    return int(node.value, 0 if node.value[:2] in ("0x", "0o") else 10)


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _construct_sequence(loader: _Loader, node: yaml.SequenceNode) -> list[Any]:
    # At once, and not as PyYAML does, which lets a list hold itself.
    return [loader.construct_object(each, deep=True) for each in node.value]


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        problem = None
        if not isinstance(key, str):
            problem = f"the key {key!r} is not a name"
        elif key in mapping:
            problem = f"{key!r} stands twice"
        if problem is not None:
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


_Loader.yaml_constructors = {
    **{
        tag: yaml.SafeLoader.yaml_constructors[tag]
        for tag in (None, f"{_PREFIX}null", f"{_PREFIX}bool", f"{_PREFIX}str")
    },
    f"{_PREFIX}int": _construct_int,
    f"{_PREFIX}float": _construct_float,
    f"{_PREFIX}seq": _construct_sequence,
    f"{_PREFIX}map": _construct_mapping,
}
_Dumper.add_representer(str, _represent_text)

for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}
    for _kind, _pattern, _first in _SCALARS:
        _class.add_implicit_resolver(f"{_PREFIX}{_kind}", re.compile(rf"^{_pattern}\Z"), _first)


def _user_error(error: yaml.YAMLError, where: str) -> UserError:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        problem = " ".join(str(error.problem).split())
        problem = problem.replace("found unconstructable recursive node", "holds itself")
        return UserError(f"{where}:{mark.line + 1}:{mark.column + 1}: {problem}")
    return UserError(f"{where}: is not YAML: {' '.join(str(error).split())}")
