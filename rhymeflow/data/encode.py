"""Encodes a prompt as token ids.

The text, from the first system message to where the response begins, is tokenized in one call.
Nothing is truncated or dropped; there is at most one beginning of sequence, and no end is added."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rhymeflow.config import DataConfig
from rhymeflow.data.prompts import Message, Prompt
from rhymeflow.data.text import TemplateError, TokenIds, Unwritable, left_to_begin, marks, rendered
from rhymeflow.errors import UserError, nearest

Tokenizer = Any  # a Hugging Face tokenizer

Schema = dict[str, Any]  # describes a tool, as `apply_chat_template(tools=...)` takes it

Tools = list[Schema] | dict[str, list[Schema]] | None
"""Tools of all rows, or by the value of a row's column `environment`; None: no tools."""


class PromptEncoder:
    """Encodes the prompts of one run. Messages go through the chat template, and so do strings if
    `data.chat_template` says so; other strings are encoded as they are.

    If the last message is the assistant's, the response continues it. `room` is the most tokens of
    a prompt (None: any number). The chat template describes `tools` to the policy."""

    def __init__(
        self, tokenizer: Tokenizer, config: DataConfig, room: int | None = None, tools: Tools = None
    ) -> None:
        self._tokenizer, self._config = tokenizer, config
        self._room, self._tools, self._ids = room, tools, TokenIds(tokenizer)
        self._has_template = has_template = bool(tokenizer.chat_template)
        if config.chat_template and not has_template:
            raise UserError("data.chat_template: the model's tokenizer has no chat template")
        self._wraps = has_template if config.chat_template is None else bool(config.chat_template)
        variables = config.chat_template_kwargs
        _check_variables(tokenizer.chat_template, variables)
        self._marks = marks(tokenizer, variables) if has_template else []
        self._left_to_begin = left_to_begin(tokenizer, variables) if has_template else ""

    @property
    def writes_date(self) -> bool:
        """Whether the chat template writes the date, so that a prompt is another one tomorrow."""
        return "strftime_now" in str(self._tokenizer.chat_template)

    @property
    def most_tokens(self) -> int:
        """Most tokens of a prompt; `room` or `data.max_prompt_length` has to be given."""
        limits = self._room, self._config.max_prompt_length
        return min(each for each in limits if each is not None)

    def wraps(self, prompt: str | list[Message]) -> bool:
        """Return whether the prompt goes through the chat template."""
        return self._wraps or not isinstance(prompt, str)

    def encode(self, prompt: Prompt, tools: list[Schema] | None = None) -> list[int]:
        """Return the prompt's token ids, at least one; `tools` are for this prompt alone. Raises
        `UserError` if the prompt does not fit the chat template, or is too long."""
        uses_template = self.wraps(prompt.prompt)
        text = self._rendered(prompt, tools) if uses_template else self._bare(prompt)
        text += self._config.assistant_prefix or ""
        try:
            # A chat template writes the beginning of the sequence itself.
            ids = self._ids(text) if uses_template else self._ids.begun(text)
        except Unwritable as error:
            raise UserError(f"{prompt.where}: {error}") from None
        if not ids:
            raise UserError(f"{prompt.where}: the prompt has no tokens")
        limit, length = self._config.max_prompt_length, f"the prompt is {len(ids)} tokens long"
        if limit is not None and len(ids) > limit:
            raise UserError(f"{prompt.where}: {length}, data.max_prompt_length = {limit}")
        if self._room is not None and len(ids) > self._room:
            raise UserError(
                f"{prompt.where}: {length}; the model's context, less "
                f"rollout.max_completion_length, leaves {self._room}"
            )
        return ids

    def conversation(self, prompt: Prompt) -> list[Message] | None:
        """Return the messages for the chat template; None for text that is encoded as it is."""
        if isinstance(prompt.prompt, str) and not self._wraps:
            return None
        return messages_of(prompt, self._config)

    def seen(self, prompt: str | list[Message]) -> str | list[Message]:
        """Return what the policy reads, `data.assistant_prefix` included: text, or messages for the
        chat template."""
        prefix = self._config.assistant_prefix or ""
        messages = self.conversation(Prompt(0, prompt, {}))
        if messages is None:
            assert isinstance(prompt, str)
            return prompt + prefix
        if not prefix:
            return messages
        begun = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
        return [*messages, {"role": "assistant", "content": begun + prefix}]

    def _bare(self, prompt: Prompt) -> str:
        assert isinstance(prompt.prompt, str)
        for field in ("system_prompt", "few_shot", "chat_template_kwargs"):
            if getattr(self._config, field):
                raise UserError(
                    f"data.{field}: text prompts are not wrapped as messages here "
                    "(data.chat_template is off, or the model's tokenizer has none)"
                )
        return prompt.prompt

    def _rendered(self, prompt: Prompt, tools: list[Schema] | None) -> str:
        if not self._has_template:
            raise UserError(
                f"{prompt.where}: the prompt is a list of messages, but the model's tokenizer has "
                "no chat template"
            )
        if self._looks_rendered(prompt.prompt):
            raise UserError(
                f"{prompt.where}: the text has {self._marks[0]!r}, as if the chat template had "
                "written it, and would be wrapped again; data.chat_template = false takes text as "
                "it is, true wraps it all the same"
            )
        messages = messages_of(prompt, self._config)
        continues = messages[-1]["role"] == "assistant"
        if not (continues or self._config.assistant_prefix) and self._left_to_begin:
            raise UserError(
                "the chat template does not begin the assistant's turn "
                "(add_generation_prompt), so the policy would have to; data.chat_template = FILE "
                "gives one that does or, except for sft, data.assistant_prefix: "
                f"{json.dumps(self._left_to_begin)}"
            )
        tools, given = tools or self._tools_of(prompt), self._config.chat_template_kwargs
        try:
            text = rendered(self._tokenizer, messages, tools, continues=continues, variables=given)
        except TemplateError as error:
            raise UserError(
                f"{prompt.where}: the chat template refuses the prompt: {error}"
            ) from None
        _check_complete(prompt.where, text, messages, tools or [])
        return text

    def _looks_rendered(self, prompt: str | list[Message]) -> bool:
        """Return whether a string looks like the template's output, unless it is to be wrapped."""
        if self._config.chat_template is True or not isinstance(prompt, str) or not self._marks:
            return False
        return all(mark in prompt for mark in self._marks)

    def _tools_of(self, prompt: Prompt) -> list[Schema] | None:
        if not isinstance(self._tools, dict):
            return self._tools
        return self._tools.get(prompt.columns.get("environment", "")) or None


def _check_variables(template: Any, variables: Mapping[str, Any]) -> None:
    """Raise `UserError` if the template has no such variable, which would have no effect."""
    texts = [*template.values()] if isinstance(template, dict) else [template or ""]
    texts.append(str(variables.get("chat_template", "")))
    words = set(re.findall(r"\w+", " ".join(texts)))
    for name in variables:
        if name not in words | {"chat_template"}:
            raise UserError(
                f"data.chat_template_kwargs: the model's chat template has no variable {name!r}"
                f"{nearest(name, words)}"
            )


def _check_complete(where: str, text: str, messages: list[Message], tools: list[Schema]) -> None:
    """Raise `UserError` if the template has left out a message, a call or a tool."""
    where = f"{where}: the chat template"
    for message in messages:
        role, content = message["role"], message["content"]
        if role in ("system", "user") and not _is_in(content, text):
            raise UserError(
                f"{where} leaves the {role} message out of the prompt ({content[:30]!r})"
            )
        for call in message.get("tool_calls", ()):
            if (name := call.get("function", call)["name"]) not in text:
                raise UserError(f"{where} leaves the call of {name!r} out of the prompt")
    for tool in tools:
        name = tool.get("function", tool).get("name")
        if name and not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text):
            raise UserError(
                f"{where} does not mention the tool {name!r}, and neither does the prompt "
                "(data.system_prompt, data.few_shot)"
            )


def _is_in(content: str, text: str) -> bool:
    """Return whether any line of a message is in the text: templates may change the others."""
    lines = [line.strip() for line in content.splitlines() if line.strip()]
    return not lines or any(line in text for line in lines)


def messages_of(prompt: Prompt, config: DataConfig) -> list[Message]:
    """Return the messages for the chat template: a string becomes a user's message, after
    `data.system_prompt` and `data.few_shot`. `UserError` if there are two system messages."""
    messages = prompt.prompt
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    few_shot: list[Message] = [each.model_dump() for each in config.few_shot]
    system_messages = messages[:1] if messages[0]["role"] == "system" else []
    if config.system_prompt is None:
        return [*system_messages, *few_shot, *messages[len(system_messages) :]]
    if system_messages:
        raise UserError(
            f"{prompt.where}: the prompt has a system message of its own, and "
            "data.system_prompt gives another"
        )
    return [{"role": "system", "content": config.system_prompt}, *few_shot, *messages]
