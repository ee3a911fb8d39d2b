"""Chat templates that TRL knows: a family's name, its variant for training, how calls are parsed.

A template is known by its whole text, so one that somebody changed is not known."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HARMONY_CALL = (
    r"to=functions\.(?P<name>[^\s<]+)\s*(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?(?:json)?\s*"
    r"<\|message\|>"
)
"""How gpt-oss's calls begin. TRL's pattern is of the chat template's form alone; the model may also
name the tool after the channel (openai-harmony's docs/format.md, "Function calling")."""


@dataclass(frozen=True)
class Family:
    """A known chat template. `name` is TRL's, such as `qwen3`."""

    name: str
    training: str | None
    """TRL's variant for training; None if there is none, or if the template is that."""


def family_of(template: Any) -> Family | None:
    """Return the family of a tokenizer's chat template, which may be several by name, or None."""
    text = template.get("default") if isinstance(template, dict) else template
    texts = _texts()
    name = next((each for each, known in texts.items() if known == text), None)
    return None if name is None else Family(name, texts.get(f"{name}_training"))


def response_template(family: Family) -> Mapping[str, Any] | None:
    """Return what transformers' `parse_response` reads the family's calls by; None if TRL has none.
    Takes a second or two: TRL loads `datasets`."""
    from trl.chat_template_utils import add_response_schema

    own = family.name.removesuffix("_training")
    holder = SimpleNamespace(chat_template=_texts()[own])  # of a tokenizer it reads no more
    try:
        add_response_schema(holder)
    except ValueError:  # TRL has none
        return None
    response: dict[str, Any] = deepcopy(holder.response_template)
    if own == "gptoss":
        response["fields"]["tool_calls"]["open_pattern"] = HARMONY_CALL
    return response


@cache
def _texts() -> dict[str, str]:
    """TRL's chat templates by name, without TRL's code, which takes long to load."""
    import trl

    directory = Path(trl.__file__).parent / "chat_templates"
    return {path.stem: path.read_text(encoding="utf-8") for path in directory.glob("*.jinja")}
