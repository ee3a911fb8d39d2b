"""Tools: functions that the policy may call, their schemas, and the arguments of calls.

transformers makes a schema of signature and docstring (`get_json_schema`). A function is called
only with arguments that fit its schema."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from rhymeflow.data.encode import Schema
from rhymeflow.environments.messages import Call
from rhymeflow.errors import UserError, nearest


def schema_of(tool: Callable[..., Any], where: str) -> Schema:
    """Return the schema of a tool. Raises `UserError` if signature or docstring are incomplete."""
    from transformers.utils import chat_template_utils as schemas  # loads torch

    for name, parameter in inspect.signature(tool).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"{where}: parameter {name!r} cannot be given by name")
    try:
        schema: Schema = schemas.get_json_schema(tool)
        json.dumps(schema)
    except schemas.DocstringParsingException as error:
        raise UserError(f"{where}: {error} (Google style: `Args:` and a line for each)") from None
    except (schemas.TypeHintParsingException, NameError, TypeError, ValueError, KeyError) as error:
        raise UserError(f"{where}: {error}; the policy is told the types of arguments") from None
    return schema


class CallRefused(ValueError):  # noqa: N818 - it is what happened
    """A call does not fit the tool; the policy reads the message."""


def arguments_of(call: Call, schemas: dict[str, Schema]) -> dict[str, Any]:
    """Return the arguments for a tool. Raises `CallRefused` if the call does not fit its schema."""
    if call.error:
        raise CallRefused(f"the tool call cannot be read: {call.error}")
    if call.name not in schemas:
        raise CallRefused(f"there is no tool {call.name!r}{nearest(call.name, schemas)}")
    parameters = schemas[call.name]["function"]["parameters"]
    known = parameters["properties"]
    given: dict[str, Any] = json.loads(call.arguments)
    for name in given:
        if name not in known:
            raise CallRefused(f"{call.name} takes no argument {name!r}{nearest(name, known)}")
    for name in parameters.get("required", ()):
        if name not in given:
            raise CallRefused(f"{call.name} needs the argument {name!r}")
    for name, value in given.items():
        if call.is_text:
            given[name] = value = _converted(value, known[name])
        if not fits(value, known[name]):
            raise CallRefused(
                f"{call.name}: argument {name!r} is {_shown(value)}, should be "
                f"{_described(known[name])}"
            )
    return given


def example(schema: Schema) -> Any:
    """Return a value that fits a schema of transformers."""
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return example(min(schema["anyOf"], key=lambda each: each.get("type") != "string"))
    kind = schema.get("type", "string")
    kind = min(kind, key=lambda each: each != "string") if isinstance(kind, list) else kind
    if kind == "object" and "properties" in schema:
        return {name: example(each) for name, each in schema["properties"].items()}
    if kind == "array":
        return [example(each) for each in schema.get("prefixItems", [schema.get("items", {})])]
    examples: Schema = {"integer": 3, "number": 2.5, "boolean": True, "object": {}, "null": None}
    return examples.get(kind, "some text")


def fits(value: Any, schema: Schema) -> bool:
    """Whether a decoded JSON value fits a schema of transformers."""
    if value is None and schema.get("nullable"):
        return True
    if "enum" in schema and not any(
        value == each and type(value) is type(each) for each in schema["enum"]
    ):
        return False
    if "anyOf" in schema:
        return any(fits(value, each) for each in schema["anyOf"])
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(_is_of_type(value, name) for name in types):
        return False
    if isinstance(value, list):
        if "prefixItems" in schema:
            parts = schema["prefixItems"]
            return len(parts) == len(value) and all(map(fits, value, parts))
        return all(fits(each, schema.get("items", {})) for each in value)
    if isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
        return all(fits(each, schema["additionalProperties"]) for each in value.values())
    return True


def _is_of_type(value: Any, name: str) -> bool:
    if name == "boolean" or isinstance(value, bool):  # a bool is an int in Python
        return name == "boolean" and isinstance(value, bool)
    types: dict[str, Any] = {
        "string": str, "integer": int, "number": (int, float), "array": list, "object": dict,
        "null": type(None),
    }  # fmt: skip
    return name not in types or isinstance(value, types[name])


_OF_PYTHON = {"True": True, "False": False, "None": None}


def _converted(text: str, schema: Schema) -> Any:
    """Return the text itself if the schema allows text, else its value as JSON."""
    if fits(text, schema):
        return text
    if text in _OF_PYTHON:  # some templates write Python's values
        return _OF_PYTHON[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # which does not fit


def _described(schema: Schema) -> str:
    known = {name: schema[name] for name in ("type", "enum", "anyOf", "items") if name in schema}
    return json.dumps(known) if set(known) != {"type"} else str(known["type"])


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
