"""What a chat template makes of a conversation; whatever it raises is a `TemplateError`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rhymeflow.data.token_ids import special_tokens

_SAID = "rhymeflow-said-this"
NOTHING: Mapping[str, Any] = {}
_ASKED = [{"role": "user", "content": "a question"}]


class TemplateError(ValueError):
    """The chat template does not write the conversation; the text says why, in one line."""


def rendered(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    *,
    opens: bool = True,
    continues: bool = False,
    variables: Mapping[str, Any] = NOTHING,
) -> str:
    """Return the conversation as the template writes it, with the beginning of an answer where it
    `opens`. `continues`: its last message is to be that beginning. `variables`: of the template."""
    import jinja2  # the tokenizer's template engine, which is what the error below is of

    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=opens and not continues,
            continue_final_message=continues,
            **variables,
        )
    except jinja2.TemplateError as error:
        raise TemplateError(_line(error)) from None
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise TemplateError(_why(error, tokenizer.chat_template, continues)) from None
    assert isinstance(text, str)
    if continues and not text.endswith(begun := messages[-1]["content"]):
        kept = begun.rstrip()  # some templates trim blanks, after which the answer is to go on
        text += begun[len(kept) :] if text.endswith(kept) else ""
    return text


def _why(error: Exception, template: Any, continues: bool) -> str:
    if isinstance(template, dict) and "default" not in template and isinstance(error, ValueError):
        names = ", ".join(template)
        return (
            f"there are several, {names}, and none is the default; data.chat_template_kwargs = "
            "{chat_template: NAME} chooses one"
        )
    if continues and "continue_final_message" in str(error):
        return "it leaves out the assistant's message that the answer goes on from"
    return f"{type(error).__name__}: {_line(error)}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def marks(tokenizer: Any, variables: Mapping[str, Any]) -> list[str]:
    """Return what text that the template made has: the special tokens after a user's message, or
    what else stands there."""
    try:
        asked = rendered(tokenizer, [{"role": "user", "content": _SAID}], variables=variables)
    except TemplateError:
        return []  # it is said of the first prompt
    after = asked.rpartition(_SAID)[2].strip()
    found = [each for each in special_tokens(tokenizer) if each in after]
    return found or [after] * bool(after)


def left_to_begin(tokenizer: Any, variables: Mapping[str, Any]) -> str:
    """Return what the template writes before what the assistant says, where it does not write that
    after a question; empty if it does, or if there is nothing."""
    said = [*_ASKED, {"role": "assistant", "content": _SAID}]
    try:
        asked = rendered(tokenizer, _ASKED, variables=variables)
        whole = rendered(tokenizer, said, opens=False, variables=variables)
        if asked != rendered(tokenizer, _ASKED, opens=False, variables=variables):
            return ""
    except TemplateError:
        return ""
    before, found, _ = whole.partition(_SAID)
    begin = before.removeprefix(asked) if found and before.startswith(asked) else ""
    return begin if begin.strip() else ""
