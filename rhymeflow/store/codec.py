"""Encodes events and commands as JSON text, and decodes them.

The kind is the class's name. The body holds the fields by name, so SQL can aggregate them with
`json_extract`. A trajectory id is the list [group, member]."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, get_args

import msgspec

from rhymeflow.core.commands import Command
from rhymeflow.core.events import Event

KINDS: dict[str, type] = {kind.__name__: kind for kind in get_args(Event)}
COMMANDS: dict[str, type] = {kind.__name__: kind for kind in get_args(Command)}

_FLOATS = {
    kind: tuple(field.name for field in fields(kind) if field.type in ("float", "float | None"))
    for kind in get_args(Event)
}

_encoder = msgspec.json.Encoder()
_decoders: dict[str, msgspec.json.Decoder[Any]] = {
    name: msgspec.json.Decoder(kind) for name, kind in {**KINDS, **COMMANDS}.items()
}


def encode(item: Event | Command) -> tuple[str, str]:
    """Return (kind, body). Floats must be finite, because JSON has no others."""
    for name in _FLOATS.get(type(item), ()):
        value = getattr(item, name)
        assert value is None or math.isfinite(value), f"{name} of {item} is not finite"
    return type(item).__name__, _encoder.encode(item).decode()


def decode(kind: str, body: str) -> Any:
    """Return the event or command that `encode` encoded."""
    return _decoders[kind].decode(body)


def prompt_of(stored: str) -> str | list[dict[str, Any]]:
    """Return a stored prompt: text, or chat messages, which are stored as JSON."""
    if not stored.startswith('[{"'):
        return stored
    try:
        messages = msgspec.json.decode(stored)
    except msgspec.DecodeError:  # text that only begins like messages
        return stored
    are_messages = all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages
    )
    return messages if are_messages else stored


def to_json(value: Any) -> str:
    """Return a data row's columns as JSON text. Arrays become lists, and other values that JSON
    does not have (dates, paths) become text; not-a-number becomes null."""
    return msgspec.json.encode(value, enc_hook=_encodable).decode()


def _encodable(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
