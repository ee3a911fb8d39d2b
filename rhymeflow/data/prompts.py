"""Checks rows of data and turns them into prompts.

A `Prompt` from `checked` has text or a well-formed list of messages, and columns of JSON's types,
which reach a reward process unchanged."""

from __future__ import annotations

import datetime
import decimal
import math
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from rhymeflow.errors import UserError, nearest
from rhymeflow.utils.user_values import shown

Message = dict[str, Any]
"""`role` and `content` are text; an assistant's message may have `tool_calls`."""

_TIMES = (datetime.datetime, datetime.date, datetime.time)

_MEDIA = "images", "videos", "audios"
"""Columns, by verl's and TRL's names, of what a prompt shows beside text."""

RESERVED = frozenset({"prompts", "completions", "completion_ids"})
"""Arguments of every reward function, which no column may be named."""


@dataclass(frozen=True, slots=True)
class Row:
    """Values as they were read, and where from, such as `sums.jsonl:12`."""

    where: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem: `row` counts from 0 in its source; `columns` reach rewards by name."""

    row: int
    prompt: str | list[Message]
    columns: dict[str, Any]
    where: str = "prompt"  # where it was read, for messages


def checked(rows: Iterable[Row], prompt_column: str) -> list[Prompt]:
    """Check rows and number them from 0. Raises `UserError` that begins with where the row is."""
    return [_checked(index, row, prompt_column) for index, row in enumerate(rows)]


def _checked(index: int, row: Row, prompt_column: str) -> Prompt:
    values = dict(row.values)
    if prompt_column not in values:
        raise UserError(
            f"{row.where}: no column {prompt_column!r}; data.prompt_column names the one that "
            f"holds the prompt{nearest(prompt_column, values)}"
        )
    prompt = _prompt(values.pop(prompt_column), f"{row.where}: column {prompt_column!r}")
    if shows := next((n for n in _MEDIA if isinstance(values.get(n), list) and values[n]), None):
        raise UserError(
            f"{row.where}: column {shows!r} holds {shown(values[shows])}, and the policy reads "
            "text only; leave the column out"
        )
    columns = {}
    for name, value in _with_ground_truth(values, row.where).items():
        if name in RESERVED:
            raise UserError(
                f"{row.where}: column {name!r} has the name of an argument that every reward "
                "function is given; rename it"
            )
        columns[_text(name, f"{row.where}: the name {name!r} of a column")] = plain(
            value, f"{row.where}: column {name!r}"
        )
    return Prompt(index, prompt, columns, row.where)


def _prompt(value: Any, where: str) -> str | list[Message]:
    if isinstance(value, str):
        if not value:
            raise UserError(f"{where}: the prompt is empty")
        return _text(value, where)
    if not isinstance(value, list):
        raise UserError(f"{where}: should be a string or a list of messages, is {shown(value)}")
    if not value:
        raise UserError(f"{where}: the list of messages is empty")
    return [_message(each, f"{where}, message {index}") for index, each in enumerate(value)]


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise UserError(f'{where}: should be {{"role": ..., "content": ...}}, is {shown(value)}')
    # Parquet gives every message of a file the same keys, absent ones as None.
    message = {key: entry for key, entry in value.items() if entry is not None}
    if message.get("role") == "assistant" and "tool_calls" in message:
        calls = _tool_calls(message["tool_calls"], where)
        message = {"content": "", **message, "tool_calls": calls}
    if isinstance(message.get("content"), list) and message["content"]:
        message["content"] = "\n".join(_part(each, where) for each in message["content"])
    for key in ("role", "content"):
        if key not in message:
            raise UserError(f"{where}: has no {key!r}{nearest(key, message)}")
        if not isinstance(message[key], str):
            raise UserError(f"{where}: {key!r} should be text, is {shown(message[key])}")
    return plain(message, where)


def _part(value: Any, where: str) -> str:
    """Return the text of a part of a message, {"type": "text", "text": ...}."""
    if isinstance(value, dict):
        match {key: entry for key, entry in value.items() if entry is not None}:
            case {"type": "text", "text": str() as text, **others} if not others:
                return text
    raise UserError(
        f"{where}: 'content' should be text or parts with text, has {shown(value)}; the policy "
        "reads text only"
    )


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Return calls, {"function": {"name", "arguments"}} or {"name", "arguments"}, with arguments as
    mappings; OpenAI has them as JSON text."""
    if not isinstance(value, list | tuple) or not value:
        raise UserError(f"{where}: 'tool_calls' should be a list of calls, is {shown(value)}")
    calls = []
    for index, each in enumerate(value):
        at = f"{where}, call {index}"
        if not isinstance(each, dict):
            raise UserError(f"{at}: should be a mapping, is {shown(each)}")
        call = {key: entry for key, entry in each.items() if entry is not None}
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(f"{at}: has no name of a function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = msgspec.json.decode(arguments)
            except msgspec.DecodeError as error:
                raise UserError(f"{at}: 'arguments' is no JSON: {error}") from None
        if not isinstance(arguments, dict):
            raise UserError(f"{at}: 'arguments' should be a mapping, is {shown(arguments)}")
        function = {**function, "arguments": arguments}
        calls.append({**call, "function": function} if "function" in call else function)
    return calls


def _with_ground_truth(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Copy `ground_truth` of verl's column `reward_model`, or SkyRL's `reward_spec`, to a column
    `ground_truth`, where rewards find it."""
    for column in ("reward_model", "reward_spec"):
        nested = values.get(column)
        if not isinstance(nested, dict) or "ground_truth" not in nested:
            continue
        truth = nested["ground_truth"]
        if "ground_truth" in values and values["ground_truth"] != truth:
            raise UserError(
                f"{where}: columns 'ground_truth' and '{column}.ground_truth' differ: "
                f"{shown(values['ground_truth'])} and {shown(truth)}"
            )
        values = values | {"ground_truth": truth}
    return values


def kind_of(names: Sequence[str], columns: Mapping[str, Any], where: str) -> int:
    """Return the index in `names` of a row's environment; if there are several, the row's column
    `environment` names it. Raises `UserError` if it does not."""
    if len(names) < 2:
        return 0
    named = columns.get("environment")
    if named not in names:
        is_there = "environment" in columns
        what = f"column 'environment' is {named!r}" if is_there else "no column 'environment'"
        raise UserError(f"{where}: {what}, should name one of {', '.join(names)}")
    return names.index(named)


def opened(prompt: str | list[Message], text: str) -> str | list[Message]:
    """Return the prompt with an environment's opening `text` added to the last user message, or to
    a prompt that is text. Raises `UserError` if there is no user message."""
    where = "an environment opens with text, and a prompt"
    return _changed(prompt, lambda said: said + text, where) if text else prompt


def told(prompt: Prompt, template: str) -> Prompt:
    """Return the prompt with the template in place of the text, or of the last user message;
    `{prompt}` is that text, and other names in braces are columns. Raises `UserError` if the row
    has no such column, or no user message."""

    def filled(text: str) -> str:
        values = {**prompt.columns, "prompt": text}
        for name in re.findall(r"\{(\w+)\}", template):
            if name not in values:
                raise UserError(
                    f"{prompt.where}: learner.distillation.prompt: there is no column {name!r}"
                    f"{nearest(name, values)}"
                )
        return re.sub(r"\{(\w+)\}", lambda match: str(values[match[1]]), template)

    return replace(prompt, prompt=_changed(prompt.prompt, filled, f"{prompt.where}: the prompt"))


def _changed(
    prompt: str | list[Message], change: Callable[[str], str], where: str
) -> str | list[Message]:
    if isinstance(prompt, str):
        return change(prompt)
    last = max((n for n, each in enumerate(prompt) if each["role"] == "user"), default=None)
    if last is None:
        raise UserError(f"{where} has no message of the user's")
    message = {**prompt[last], "content": change(prompt[last]["content"])}
    return [*prompt[:last], message, *prompt[last + 1 :]]


def opening_of(prompt: str | list[Message], stored: str) -> str | None:
    """Return the text with which `opened` turns the prompt into the `stored` one (text, or messages
    as JSON), or None if there is no such text."""
    if isinstance(prompt, str):
        return stored[len(prompt) :] if stored.startswith(prompt) else None
    messages: list[Message] = msgspec.json.decode(stored)
    pairs = zip(prompt, messages, strict=False)
    added = ["", *(after["content"][len(before["content"]) :] for before, after in pairs)]
    return next((text for text in added if opened(prompt, text) == messages), None)


def plain(value: Any, where: str) -> Any:
    """Convert the value to JSON's types. Raises `UserError` if that is not possible."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UserError(f"{where}: holds {value}; null stands for a missing number")
        return value
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise UserError(f"{where}: the number {value} has more than 64 bits; give it as text")
        return value
    if type(value) is str:
        return _text(value, where)
    if isinstance(value, list | tuple):
        return [plain(each, where) for each in value]
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str:
                raise UserError(f"{where}: the key {key!r} of a mapping is no text")
            _text(key, f"{where}: the key {key!r} of a mapping")
        return {key: plain(each, where) for key, each in value.items()}
    if (converted := _as_json(value)) is not value:
        return plain(converted, where)
    raise UserError(
        f"{where}: holds {shown(value)}; reward functions are given text, numbers, booleans, "
        "lists and mappings only: convert the column or leave it out"
    )


def _as_json(value: Any) -> Any:
    """Convert NumPy arrays and scalars to lists and numbers, times to ISO text, durations to
    seconds and decimals to text; return any other value as it is."""
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # NumPy's, torch's
        converted = value.tolist()
        return _as_json(converted) if isinstance(converted, _TIMES) else converted
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)
    if isinstance(value, str):  # a subclass
        return str.__str__(value)
    if isinstance(value, _TIMES) or hasattr(value, "isoformat"):  # pandas'
        return value.isoformat()
    return value


def _text(value: str, where: str) -> str:
    try:
        msgspec.msgpack.encode(value)
    except UnicodeEncodeError:
        raise UserError(f"{where}: holds half of a surrogate pair, which is no text") from None
    return value
