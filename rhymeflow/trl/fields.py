"""Every field of TRL's `GRPOConfig` and its fate: the one table that all of this package reads.

docs/from-trl.md shows it; `markdown` is what stands there.
"""

from __future__ import annotations

from collections.abc import Mapping

from rhymeflow.trl.field import Field
from rhymeflow.trl.grpo_fields import GRPO_FIELDS
from rhymeflow.trl.training_fields import TRAINING_FIELDS

FIELDS: Mapping[str, Field] = {each.name: each for each in (*TRAINING_FIELDS, *GRPO_FIELDS)}
"""By name, in the order of `GRPOConfig`'s positional arguments."""


def markdown() -> str:
    """The fields as tables, one for each fate."""
    parts = []
    for fate, head, column in (
        ("mapped", "Mapped", "sets"),
        ("passed over", "Passed over, which is printed if it is given", "because"),
        ("refused", "Refused with any value but TRL's default", "instead"),
    ):
        lines = [
            f"| `{each.name}` | {each.what} |" for each in FIELDS.values() if each.fate == fate
        ]
        parts.append(
            "\n".join([f"### {head}", "", f"| field | {column} |", "| --- | --- |", *lines])
        )
    return "\n\n".join(parts) + "\n"
