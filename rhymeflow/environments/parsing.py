"""Parses tool calls: Hermes' JSON, Qwen3-Coder's XML, LFM2's Python, or a response template's form.

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    <|tool_call_start|>[add(a=1), add(a=2)]<|tool_call_end|>
A malformed call is a `Call` with an `error`; nothing raises.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from rhymeflow.environments.messages import Call

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_OPEN, PYTHON_CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"

_FUNCTION = re.compile(r"<function=([^>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>")
_SPACE = re.compile(r"\s*")


def parse_calls(text: str) -> list[Call]:
    """Return the calls in the text, in its order."""
    calls: list[Call] = []
    place = text.find(OPEN)
    while place >= 0:
        begin = _SPACE.match(text, place + len(OPEN)).end()  # type: ignore[union-attr]
        read = _read_xml if text.startswith("<function", begin) else _read_json
        try:
            call, end = read(text, begin)
            end = _SPACE.match(text, end).end()  # type: ignore[union-attr]
            if not text.startswith(CLOSE, end):
                raise ValueError(f"it does not end with {CLOSE}")
        except (ValueError, RecursionError) as error:
            call, end = Call("", error=_one_line(error)), text.find(CLOSE, begin)
        calls.append(call)
        place = text.find(OPEN, end) if end >= 0 else -1
    for block in text.split(PYTHON_OPEN)[1:]:
        calls += _read_python(block)
    return calls


def call_of(value: Any) -> Call:
    """Return a decoded JSON object as a call. Raises `ValueError` if it is none."""
    if not isinstance(value, dict):
        raise ValueError('it is no JSON object with "name" and "arguments"')
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise ValueError('it has no "name", which is the name of a tool')
    if isinstance(arguments, str):  # as in OpenAI's interface
        arguments = _loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError('"arguments" is no JSON object')
    return Call(name, json.dumps(arguments))


def templated_calls(
    tokenizer: Any, text: str, response: Mapping[str, Any], opening: str, tools: list[Any]
) -> list[Call]:
    """Return the calls as a response template of transformers parses them."""
    try:
        message = tokenizer.parse_response(text, response, prefix=opening, tools=tools)
        functions = [each["function"] for each in message.get("tool_calls") or []]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return [Call("", error=" ".join(str(error).split()))]
    calls = []
    for function in functions:
        try:
            calls.append(call_of(_loads(json.dumps(function))))
        except (ValueError, TypeError, RecursionError) as error:
            calls.append(Call("", error=str(error)))
    return calls


def parted(
    tokenizer: Any, text: str, response: Mapping[str, Any], opening: str
) -> tuple[str, str] | None:
    """Return the reasoning of a turn and what it says, as a response template parses them; None: it
    finds nothing."""
    fields = {name: each for name, each in response["fields"].items() if name != "tool_calls"}
    for form in (response, {**response, "fields": fields}):
        try:
            message = tokenizer.parse_response(text, form, prefix=opening)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue  # a call that cannot be read is text
        reasoning = message.get("thinking") or message.get("reasoning_content") or ""
        content = message.get("content") or ""
        if form is not response and not content:
            content = text.partition(reasoning)[2] if reasoning else text
        return (reasoning, content) if reasoning or content or message.get("tool_calls") else None
    return None


def _read_json(text: str, begin: int) -> tuple[Call, int]:
    value, end = _DECODER.raw_decode(text, begin)
    return call_of(value), end


def _read_xml(text: str, begin: int) -> tuple[Call, int]:
    opened = _FUNCTION.match(text, begin)
    if opened is None or not opened[1].strip():
        raise ValueError("<function=NAME> names no tool")
    arguments: dict[str, str] = {}
    place = opened.end()
    while (parameter := _PARAMETER.match(text, place)) is not None:
        close = text.find("</parameter>", parameter.end())
        if close < 0:
            raise ValueError(f"parameter {parameter[1]!r} does not end with </parameter>")
        value = text[parameter.end() : close]
        arguments[parameter[1].strip()] = value.removeprefix("\n").removesuffix("\n")
        place = close + len("</parameter>")
    place = _SPACE.match(text, place).end()  # type: ignore[union-attr]
    if not text.startswith("</function>", place):
        raise ValueError("it does not end with </function>")
    call = Call(opened[1].strip(), json.dumps(arguments), is_text=True)
    return call, place + len("</function>")


def _read_python(block: str) -> list[Call]:
    """Return the calls in what follows `PYTHON_OPEN`. TRL's pattern ends a string at `)` or `,`."""
    code, end, _ = block.partition(PYTHON_CLOSE)
    try:
        if not end:
            raise ValueError
        tree = _python(code.strip())
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_python_call(node) for node in nodes]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return [Call("", error="it is not [NAME(ARGUMENT=VALUE, ...), ...]")]


def _python(code: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of backslashes
        try:
            return ast.parse(code, mode="eval").body
        except SyntaxError:  # LFM2.5's template writes text with its ends of lines
            return ast.parse(code.replace("\n", r"\n"), mode="eval").body


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or not all(each.arg for each in node.keywords):
        raise ValueError
    values = {each.arg: ast.literal_eval(_Json().visit(each.value)) for each in node.keywords}
    return Call(ast.unparse(node.func), json.dumps(values, allow_nan=False))


class _Json(ast.NodeTransformer):
    """Mappings and lists are written as JSON."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        names = {"true": True, "false": False, "null": None}
        return ast.Constant(names[node.id]) if node.id in names else node


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _loads(text: str) -> Any:
    return json.loads(text, parse_constant=_no_constant)


def _one_line(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"it is no JSON: {error.msg}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
