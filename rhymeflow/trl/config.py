"""`GRPOConfig`: the fields of TRL's, with its names, order, types and defaults.

Holds true: it is a dataclass, so parsers that are made of one (`HfArgumentParser`, `TrlParser`)
take it; a name that is no field is a `UserError` that says what to do. It may be changed until a
trainer is made of it, which is when it is looked at as a whole. Knows nothing of what becomes of a
field.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from rhymeflow.errors import UserError, suggestion
from rhymeflow.trl.fields import FIELDS
from rhymeflow.trl.removed_fields import REMOVED

EXTRA = "rhymeflow"
"""The field that TRL does not have: a mapping of fields of ours."""


class _Arguments:
    """Makes the dataclass from what it is given, and has what scripts ask a configuration for."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        names = [each.name for each in dataclasses.fields(self)]  # type: ignore[arg-type]
        if len(arguments) > len(names):
            raise UserError(f"GRPOConfig: has {len(names)} fields, given {len(arguments)}")
        given = dict(zip(names, arguments, strict=False))
        for name in named:
            if name in given:
                raise UserError(f"GRPOConfig: {name} is given twice, by place and by name")
            if name not in names:
                raise UserError(f"GRPOConfig: {unknown(name)}")
        for name in names:
            setattr(self, name, {**given, **named}.get(name, _DEFAULTS[name]))

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return {name: getattr(self, name) for name in _DEFAULTS}

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """There is one process."""
        yield

    world_size = 1
    process_index = 0
    local_process_index = 0


def unknown(name: str) -> str:
    """What is to be said of a name that is no field."""
    if name in REMOVED:
        return f"{name}: TRL has no such field any more; {REMOVED[name]}"
    return f"there is no field {name!r}{suggestion(name, FIELDS)}"


_DEFAULTS = {each.name: each.default for each in FIELDS.values()} | {EXTRA: None}


def _field(default: Any) -> Any:
    if isinstance(default, list):
        return dataclasses.field(default_factory=list)
    return dataclasses.field(default=default)


GRPOConfig = dataclasses.make_dataclass(
    "GRPOConfig",
    [
        *((each.name, each.type, _field(each.default)) for each in FIELDS.values()),
        (EXTRA, dict[str, Any] | str | None, _field(None)),
    ],
    bases=(_Arguments,),
    init=False,
    namespace={
        "__doc__": """TRL's `GRPOConfig`: 191 fields, of which docs/from-trl.md says what becomes.

    `rhymeflow` is the one field more, a mapping of fields of ours, which win:
    `{"schedule.name": "synchronous"}`.
    """,
        "__module__": __name__,
    },
)
