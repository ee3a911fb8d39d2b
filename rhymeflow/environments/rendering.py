"""Decodes the policy's turns for an environment, and encodes the environment's answers.

Sampled tokens are never encoded again. Only the answer is encoded, as the chat template writes it
after a turn of the assistant. If a template passed `check_appends`, and the policy writes turns as
the template does, then prompt, sampled turns and encoded answers together are the conversation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from rhymeflow.data.encode import Schema, Tokenizer
from rhymeflow.data.prompts import Message
from rhymeflow.data.text import (
    NOTHING,
    TemplateError,
    TokenIds,
    Unwritable,
    rendered,
    special_tokens,
)
from rhymeflow.environments import parsing
from rhymeflow.environments.families import family_of, response_template
from rhymeflow.environments.messages import Call, Said
from rhymeflow.environments.parsing import CLOSE, OPEN, PYTHON_OPEN
from rhymeflow.environments.template import (
    ANSWERED,
    QUESTION,
    SAID,
    called,
    check_appends,
    said,
    takes_tools,
    thoughts_of,
    with_ids,
    writes_calls,
)
from rhymeflow.environments.tools import CallRefused, arguments_of, example
from rhymeflow.errors import UserError
from rhymeflow.pool import Refused

INVISIBLE = "\u200b"


class TextRenderer:
    """Renders for text prompts: answers are encoded as they are, without special tokens.

    `keeps_special`: whether the text of a turn has the policy's special tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, tools: Sequence[Schema] = (), *, keeps_special: bool = False
    ) -> None:
        self._tokenizer, self._tools = tokenizer, list(tools)
        self._keeps_special = keeps_special
        self._special, self._text_ids = special_tokens(tokenizer), TokenIds(tokenizer)
        self._stop_ids = lru_cache(self._ids)  # of the few texts that turns end with

    def said(self, tokens: list[int]) -> Said:
        """Return the text and the tool calls of a turn."""
        text = self._tokenizer.decode(tokens, skip_special_tokens=not self._keeps_special)
        return Said(text, self._calls(tokens) if self._tools else [])

    def encode(self, answer: list[Message] | str, turn: list[int]) -> list[int]:
        """Return the tokens of the answer to `turn`. Messages become their contents, one after the
        other, with Hermes' tags around those of tools."""
        text = answer if isinstance(answer, str) else "".join(map(_bare, answer))
        return self._ids(self._harmless(text))

    def _harmless(self, text: str) -> str:
        """Put a zero-width space into each special token of the text, after its first character, so
        that an environment's answer cannot end or begin a turn."""
        for token in self._special:
            text = text.replace(token, f"{token[:1]}{INVISIBLE}{token[1:]}")
        return text

    def _calls(self, tokens: list[int]) -> list[Call]:
        return parsing.parse_calls(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def _ids(self, text: str) -> list[int]:
        try:
            return self._text_ids(text)
        except Unwritable as error:
            raise Refused(f"its answer cannot be encoded: {error}") from None


class ChatRenderer(TextRenderer):
    """Renders for prompts that went through the chat template.

    `reads_users`: whether answers may be messages of other roles than `tool`. `variables`: those of
    the template. If the template has no messages of tools, their answers are a message of the user,
    in Hermes' tags, and the prompt has to describe the tools. Raises `UserError` if the template
    changes earlier turns, does not accept such messages, or writes tool calls in a form that is not
    parsed. Without `appends` only turns are read, so that the template may change earlier ones.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Schema] = (),
        *,
        reads_users: bool = True,
        variables: Mapping[str, Any] = NOTHING,
        keeps_special: bool = False,
        appends: bool = True,
    ) -> None:
        super().__init__(tokenizer, tools, keeps_special=keeps_special)
        self._write = write = partial(rendered, tokenizer, tools=self._tools, variables=variables)
        template = str(tokenizer.chat_template)
        thoughts = thoughts_of(write, template)
        has_tools = bool(tools)
        self.answers_as_user = has_tools and not takes_tools(write)
        """Whether what tools answer is a message of the user."""
        reads_users = reads_users or self.answers_as_user
        reads_tools = has_tools and not self.answers_as_user
        if appends:
            check_appends(write, template, thoughts, tools=reads_tools, users=reads_users)
        self._thought, self._writes_calls = thoughts[0], writes_calls(write)
        alone = write([QUESTION, said(self._thought)], opens=False)
        _, mark, self._closing = alone.rpartition(SAID)
        """The template's text after a turn of the assistant."""
        if not mark:
            raise UserError("the chat template does not write what the assistant says, as text")
        asked, begun = write([QUESTION], opens=False), write([QUESTION])
        self._opening = begun[len(asked) :] if begun.startswith(asked) else begun
        """The template's text before a turn of the assistant."""
        self._response: Mapping[str, Any] | None = None
        """The response template that parses calls; None: those of `parse_calls`."""
        self._template = variables.get("chat_template", tokenizer.chat_template)
        self._parts: Mapping[str, Any] | None = None  # empty: nothing tells them apart
        self._find_response(begun, self._template)

    @property
    def marks_reasoning(self) -> bool:
        """Whether special tokens set apart the reasoning of a turn and what it says, as in gpt-oss
        and Gemma 4. Without these tokens they would be one text."""
        if "channel" not in str(self._template):
            return False
        if self._parts is None:
            family = None if self._own_response else family_of(self._template)
            found = self._own_response if family is None else response_template(family)
            self._parts = found or NOTHING
        return bool(self._parts)

    def parted(self, tokens: list[int]) -> tuple[str, str] | None:
        """Return the reasoning of a turn and what it says, if they are marked."""
        if not self.marks_reasoning:
            return None
        assert self._parts is not None
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        found = parsing.parted(self._tokenizer, text, self._parts, self._opening)
        if found is None:  # a turn that was cut in what marks its first part says nothing
            return ("", "") if text.startswith(tuple(self._special)) else None
        reasoning, content = found
        return reasoning, self._bare_of_special(content)

    def _find_response(self, begun: str, template: Any) -> None:
        """Set what parses the template's calls. Raises `UserError` if nothing does."""
        why = self._unread(begun)
        family = None if why is None else family_of(template)
        if family is not None and (response := response_template(family)) is not None:
            self._response = response
            why = self._unread(begun)
        if why is not None:
            raise UserError(why)

    def _unread(self, begun: str) -> str | None:
        """Return why calls, as the template writes them, are not parsed as these calls, or None. A
        template without tools need not write calls: the prompt describes them."""
        return next(filter(None, (self._unread_call(each, begun) for each in self._tools)), None)

    def _unread_call(self, tool: Schema, begun: str) -> str | None:
        name, arguments = tool["function"]["name"], example(tool["function"]["parameters"])
        turn = called(self._thought, name, writes_calls=True)
        turn["tool_calls"][0]["function"]["arguments"] = arguments
        try:
            written = self._write([QUESTION, turn], opens=False).removeprefix(begun)
        except TemplateError:
            written = ""  # it takes no calls
        is_told = name in begun and begun != self._write([QUESTION], tools=None)
        if name not in written and (not is_told or self._own_response is not None):
            return None
        try:
            calls = self._calls(self._ids(written))
            read = [(each.name, arguments_of(each, {name: tool})) for each in calls]
        except CallRefused as error:
            why = f"read as a call that is refused: {error}"
        else:
            if read == [(name, arguments)]:
                return None
            why = f"read as {read}" if read else "not read as a call"
        if name not in written:
            return (
                f"the chat template leaves out calls of tools, here of {name!r}, so their form is "
                "not known; data.chat_template = FILE gives one that writes them"
            )
        return (
            f"the chat template writes a call of the tool {name!r} as {written.strip()[:200]!r}, "
            f"which is {why}; calls are read in the forms {OPEN}{{...}}{CLOSE} (Hermes), "
            f"{OPEN}<function=...> (Qwen3-Coder) and LFM2's, by a response_template of the "
            "tokenizer, or by TRL's for the template of a known family"
        )

    def encode(self, answer: list[Message] | str, turn: list[int]) -> list[int]:
        """Return the tokens that the template appends after `turn` for the answer, up to the
        beginning of the policy's next turn. Text is a message of the user."""
        messages = self._messages(answer)
        before, head = self._before(messages)
        try:
            full = self._write([*before, *with_ids(messages)])
            asked, marked, _ = self._write([*before, *with_ids(head)]).partition(ANSWERED)
        except TemplateError as error:
            raise Refused(f"the chat template refuses its answer: {error}") from None
        kept, mark, lead = asked.rpartition(SAID)
        kept += mark
        roles = ", ".join(each["role"] for each in messages)
        if not marked:
            raise Refused(f"the chat template leaves out answers of {roles}")
        if not mark or not full.startswith(kept):
            raise Refused(f"the chat template rewrites the turn before answers of {roles}")
        stop = self._stop_text(turn)
        # The policy has sampled the stop token: only what follows it is appended. In some
        # templates, it is the token that the next message begins with.
        _, found, _ = lead.partition(stop) if stop else ("", "", "")
        if found:
            return self._after(stop, full[len(kept) :].partition(stop)[2])
        if self._writes_calls and "tool_calls" in before[-1]:
            return self._after(stop, self._closed(before, full, stop, roles))
        return self._after(stop, full[len(kept) :])

    def _closed(self, before: list[Message], full: str, stop: str, roles: str) -> str:
        """Return what follows a turn with a call that stopped otherwise than the template ends it:
        behind the mark, the template also ends the call, which the policy has written."""
        ended = self._write(before, opens=False)
        if not full.startswith(ended):
            raise Refused(f"the chat template rewrites the turn before answers of {roles}")
        return (self._closing + full[len(ended) :]).removeprefix(stop)

    def _messages(self, answer: list[Message] | str) -> list[Message]:
        """Return the answer as messages for the template."""
        if isinstance(answer, str):
            answer = [{"role": "user", "content": answer}]
        answer = [each | {"content": self._harmless(each["content"])} for each in answer]
        if not self.answers_as_user or all(each["role"] != "tool" for each in answer):
            return answer
        content = "\n".join(_bare(each).strip("\n") for each in answer)
        return [{"role": "user", "content": content}]

    def _before(self, answer: list[Message]) -> tuple[list[Message], list[Message]]:
        """Return a conversation that the answer could follow, and the answer up to its first
        message, with a mark for what that says."""
        first = answer[0]
        turn = said(self._thought)
        tool = next((each for each in answer if each["role"] == "tool"), None)
        if tool is not None:
            name = tool.get("name", "unknown")
            turn = called(self._thought, name, writes_calls=self._writes_calls)
        return [QUESTION, turn], [first | {"content": ANSWERED}]

    def _stop_text(self, turn: list[int]) -> str:
        """Return the special token at the end of the turn as text, "" if there is none."""
        text = str(self._tokenizer.decode(turn[-1:], skip_special_tokens=False))
        return text if text in self._special else ""

    def _after(self, stop: str, text: str) -> list[int]:
        """Return the tokens of the text after the stop token; encoded alone, some tokenizers would
        put a space before it."""
        lead, ids = self._stop_ids(stop), self._ids(stop + text)
        return ids[len(lead) :] if ids[: len(lead)] == lead else self._ids(text)

    def before_calls(self, tokens: list[int]) -> str:
        """Return what a turn with calls says before the first, without special tokens."""
        text = str(self._tokenizer.decode(tokens, skip_special_tokens=False))
        places = [at for tag in (OPEN, PYTHON_OPEN) if (at := text.find(tag)) >= 0]
        if not places:
            form = (self._own_response or self._response or {}).get("fields", {})
            begins = form.get("tool_calls", {})
            pattern = begins.get("open_pattern") or re.escape(begins.get("open", text))
            places = [each.start() for each in [re.search(pattern, text)] if each]
        return self._bare_of_special(text[: min(places, default=0)])

    def _bare_of_special(self, text: str) -> str:
        for token in self._special:
            text = text.replace(token, "")
        return text

    @property
    def shows_calls(self) -> bool:
        """Whether the text of a turn has the tags that its calls begin with."""
        is_templated = self._own_response is not None or self._response is not None
        return not is_templated and not {OPEN, PYTHON_OPEN} & {*self._special}

    @property
    def _own_response(self) -> Mapping[str, Any] | None:
        return getattr(self._tokenizer, "response_template", None)

    def _calls(self, tokens: list[int]) -> list[Call]:
        response = self._own_response or self._response
        if response is None:
            return super()._calls(tokens)
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return parsing.templated_calls(self._tokenizer, text, response, self._opening, self._tools)


def _bare(message: Message) -> str:
    content: str = message["content"]
    if message["role"] != "tool":
        return content
    return f"\n<tool_response>\n{content}\n</tool_response>\n"
