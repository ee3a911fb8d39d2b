"""What a script gave for each field of `GRPOConfig`: ours, or an object of TRL's own class.

Holds true: every field of the table has a value of plain types; what is refused was refused, and
what is passed over is in `notices`. Does not import TRL.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any

from rhymeflow.errors import UserError
from rhymeflow.trl.config import EXTRA, GRPOConfig
from rhymeflow.trl.field import Field
from rhymeflow.trl.fields import FIELDS

MADE_BY_TRL = ("accelerator_config", "dataloader_pin_memory", "disable_tqdm")
"""Passed over, and filled in by TRL itself from what the machine is like."""


class Given:
    """Values by field, in `values`; `extra` are fields of ours; `notices` are to be printed.

    Raises:
        UserError: it is no such configuration, or asks for something that there is not.
    """

    def __init__(self, args: Any) -> None:
        if not dataclasses.is_dataclass(args) or not hasattr(args, "per_device_train_batch_size"):
            raise UserError(
                f"GRPOTrainer: args is a {type(args).__name__}, should be a GRPOConfig of "
                "rhymeflow.trl or of TRL"
            )
        is_ours = isinstance(args, GRPOConfig)
        self.values: dict[str, Any] = {}
        self.notices: list[str] = []
        for each in dataclasses.fields(args):
            value = _plain(getattr(args, each.name))
            if each.name in FIELDS:
                field = FIELDS[each.name]
                self.values[each.name] = _parsed(value, field)
                if is_ours or each.name not in MADE_BY_TRL:
                    self._look_at(field)
            elif each.name != EXTRA and value != each.default:
                raise UserError(
                    f"GRPOConfig: {each.name} = {value!r}: this version of Rhymeflow does not know "
                    "the field (it knows TRL 1.16's)"
                )
        if not is_ours:
            self._undo_what_trl_made()
        self.values = {name: each.default for name, each in FIELDS.items()} | self.values
        self.extra = self._extra(getattr(args, EXTRA, None))

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def is_default(self, name: str) -> bool:
        """Whether a field has TRL's default."""
        return FIELDS[name].is_default(self.values[name])

    def _look_at(self, field: Field) -> None:
        value = self.values[field.name]
        if field.fate == "mapped" or field.is_default(value):
            return
        if field.fate == "refused":
            raise UserError(f"GRPOConfig: {field.name} = {value!r} is not there: {field.what}")
        self.notices.append(f"{field.name} = {value!r} has no effect: {field.what}")

    def _undo_what_trl_made(self) -> None:
        """TRL fills in what was not given; the second of two names of one thing is taken back."""
        self.values["generation_batch_size"] = None

    def _extra(self, extra: Any) -> dict[str, Any]:
        if isinstance(extra, str):  # from a command line
            extra = _json(extra, EXTRA)
        if not isinstance(extra, dict | None):
            raise UserError(
                f"GRPOConfig: {EXTRA} is a {type(extra).__name__}, should be a mapping of fields "
                "of ours, such as {'schedule.name': 'synchronous'}"
            )
        return extra or {}


def _plain(value: Any) -> Any:
    """Enumerations as their values, at any depth of lists."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _parsed(value: Any, field: Field) -> Any:
    """What a command line gives for a mapping is its text."""
    takes_mapping = "dict" in str(field.type)
    if takes_mapping and isinstance(value, str) and value != field.default:
        return _json(value, field.name)
    return value


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"GRPOConfig: {name} = {text!r} is no JSON: {error}") from None
