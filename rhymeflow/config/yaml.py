"""Reads and writes YAML 1.2: `1e-6` is a number; `on`, `no` and dates are text.

Keys are text and unique. What `write` writes, `read` reads as equal values; a mistake is a
`UserError` with file, line and column. ruamel.yaml parses and prints with this file's table of
scalars: with its own, `1_000` would be a number and `2026-01-01` a date."""

from __future__ import annotations

import io
import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import MaxDepthExceededError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import VersionedResolver

from rhymeflow.errors import UserError

_PREFIX = "tag:yaml.org,2002:"

DEEPEST = 50
"""Greatest depth of nested lists and mappings; Python's recursion limit allows a few hundred."""

LONGEST_INTEGER = 100
"""Most characters of an integer; Python cannot read or write one of some thousand digits."""

_SCALARS = (
    ("null", "~nN", r"~|null|Null|NULL|"),
    ("bool", "tTfF", r"true|True|TRUE|false|False|FALSE"),
    ("int", "-+0123456789", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    (
        "float",
        "-+.0123456789",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    ),
)
"""Kind, possible first characters and pattern of non-text scalars; the first match wins."""


def read(text: str, where: str) -> tuple[Node | None, Any]:
    """Return the text's tree, which has line numbers, and its values; (None, None) if it is empty.

    Values are dicts with text keys, lists, text, numbers, booleans and None. Raises `UserError`, in
    which `where` names the text."""
    try:
        node: Node | None = _yaml().compose(text)
        return node, None if node is None else _value(node, ())
    except MarkedYAMLError as error:
        mark, problem = error.problem_mark, " ".join(str(error.problem).split())
        if isinstance(error, MaxDepthExceededError):
            problem = f"nested more than {DEEPEST} levels deep"
        raise UserError(f"{where}:{mark.line + 1}:{mark.column + 1}: {problem}") from None
    except YAMLError as error:
        raise UserError(f"{where}: is not YAML: {' '.join(str(error).split())}") from None


def write(values: Any) -> str:
    """Return nested dicts, lists and scalars as YAML; keys keep their order."""
    stream = io.StringIO()
    _yaml().dump(values, stream)
    return stream.getvalue()


class _Resolver(VersionedResolver):
    versioned_resolver = {  # by the first character; an empty text is a null
        first: [
            (f"{_PREFIX}{kind}", re.compile(rf"(?:{pattern})\Z"))
            for kind, firsts, pattern in _SCALARS
            if first in firsts
        ]
        for first in {"", *"".join(firsts for _, firsts, _ in _SCALARS)}
    }


class _Representer(SafeRepresenter):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> Node:
        # Without double quotes these are line breaks, and would be read as such.
        style = '"' if any(mark in data for mark in "\x85\u2028\u2029") else None
        return self.represent_scalar(f"{_PREFIX}str", data, style=style)


_Representer.add_representer(str, _Representer.represent_str)


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver, yaml.Representer = _Resolver, _Representer
    yaml.max_depth = DEEPEST + 1  # a value at the top has depth 1
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    return yaml


def _value(node: Node, parents: tuple[Node, ...]) -> Any:
    """Return the value of a node; `parents` are the nodes that contain it."""
    if any(node is each for each in parents):
        raise _mistake("contains itself", node)
    parents, kind = (*parents, node), str(node.tag).removeprefix(_PREFIX)
    match node, kind:
        case SequenceNode(), "seq":
            return [_value(each, parents) for each in node.value]
        case MappingNode(), "map":
            mapping: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = _value(key_node, parents)
                if not isinstance(key, str):
                    raise _mistake(f"the key {key!r} is not a name", key_node)
                if key in mapping:
                    raise _mistake(f"{key!r} is given twice", key_node)
                mapping[key] = _value(value_node, parents)
            return mapping
        case ScalarNode(), "str" | "null" | "bool" | "int" | "float":
            return _scalar(node, kind)
    raise _mistake(f"there are no values of kind {kind}", node)


def _scalar(node: ScalarNode, kind: str) -> Any:
    text = str(node.value)
    if kind == "int" and len(text) > LONGEST_INTEGER:
        raise _mistake(f"an integer of {len(text):,} characters", node)
    try:
        match kind:
            case "null":
                return None
            case "bool":
                return {"true": True, "false": False}[text.lower()]
            case "int":
                return int(text, 0 if text[:2] in ("0x", "0o") else 10)
            case "float":
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    except (KeyError, ValueError):  # the kind was given by a tag, as in `!!int x`
        raise _mistake(f"{text!r} is no {kind}", node) from None
    return text


def _mistake(problem: str, node: Node) -> MarkedYAMLError:
    return MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
