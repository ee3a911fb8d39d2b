"""Decodes the policy's turns for an environment, and encodes the environment's answers.

Sampled tokens are never encoded again. Only the answer is encoded, as the chat template writes it
after a turn of the assistant. If a template passed `check_appends`, and the policy writes turns as
the template does, then prompt, sampled turns and encoded answers together are the conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
from rhymeflow.environments.messages import Call, Said
from rhymeflow.environments.parsing import CLOSE, OPEN, own_calls, parse_calls
from rhymeflow.environments.tools import CallRefused, arguments_of, example
from rhymeflow.errors import UserError
from rhymeflow.pool import Refused

INVISIBLE = "\u200b"
_MARK = "rhymeflow-said-this"
_THOUGHT = "<think>\nit is so\n</think>\n\n"
_QUESTION = {"role": "user", "content": "a question"}
_REMEDY = (
    "the policy would read its earlier turns differently than it wrote them; give the tokenizer a "
    "template for training, which only appends"
)


class TextRenderer:
    """Renders for text prompts: answers are encoded as they are, without special tokens."""

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Schema] = ()) -> None:
        self._tokenizer, self._tools = tokenizer, list(tools)
        self._special, self._text_ids = special_tokens(tokenizer), TokenIds(tokenizer)

    def said(self, tokens: list[int]) -> Said:
        """Return the text and the tool calls of a turn."""
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
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
        return parse_calls(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def _ids(self, text: str) -> list[int]:
        try:
            return self._text_ids(text)
        except Unwritable as error:
            raise Refused(f"its answer cannot be encoded: {error}") from None


class ChatRenderer(TextRenderer):
    """Renders for prompts that went through the chat template.

    `reads_users`: whether answers may be messages of other roles than `tool`. `variables`: those of
    the template. Raises `UserError` if the template changes earlier turns, does not accept such
    messages, or writes tool calls in a form that is not parsed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Schema] = (),
        *,
        reads_users: bool = True,
        variables: Mapping[str, Any] = NOTHING,
    ) -> None:
        super().__init__(tokenizer, tools)
        self._write = partial(rendered, tokenizer, tools=self._tools, variables=variables)
        thoughts = _thoughts(self._write, str(tokenizer.chat_template))
        check_appends(self._write, thoughts, reads_tools=bool(tools), reads_users=reads_users)
        self._thought = thoughts[0]
        said = self._write([_QUESTION, _assistant(self._thought + _MARK)], opens=False)
        _, mark, self._closing = said.rpartition(_MARK)
        """The template's text after a turn of the assistant."""
        if not mark:
            raise UserError("the chat template does not write what the assistant says, as text")
        asked, begun = self._write([_QUESTION], opens=False), self._write([_QUESTION])
        self._opening = begun[len(asked) :] if begun.startswith(asked) else begun
        """The template's text before a turn of the assistant."""
        for tool in self._tools:
            self._check_read(tool, begun)

    def _check_read(self, tool: Schema, begun: str) -> None:
        """Raise `UserError` if a call of the tool, as the template writes it, is not parsed as
        that call. A template without tools need not write calls: the prompt describes them."""
        name, arguments = tool["function"]["name"], example(tool["function"]["parameters"])
        asked = [_QUESTION, _dummy([{"role": "tool", "name": name}], 0, self._thought, arguments)]
        said = self._write(asked, opens=False).removeprefix(begun)
        is_told = name in begun and begun != self._write([_QUESTION], tools=None)
        if name not in said and not is_told:
            return
        calls = self._calls(self._ids(said))
        try:
            read = [(each.name, arguments_of(each, {name: tool})) for each in calls]
        except CallRefused as error:
            why = f"read as a call that is refused: {error}"
        else:
            if read == [(name, arguments)]:
                return
            why = f"read as {read}" if read else "not read as a call"
        raise UserError(
            f"the chat template writes a call of the tool {name!r} as {said.strip()[:200]!r}, "
            f"which is {why}; calls are read in the forms {OPEN}{{...}}{CLOSE} (Hermes) and "
            f"{OPEN}<function=...> (Qwen3-Coder), or by a response_template of the tokenizer"
        )

    def encode(self, answer: list[Message] | str, turn: list[int]) -> list[int]:
        """Return the tokens that the template appends after `turn` for the answer, up to the
        beginning of the policy's next turn. Text is a message of the user."""
        if isinstance(answer, str):
            answer = [{"role": "user", "content": answer}]
        answer = [each | {"content": self._harmless(each["content"])} for each in answer]
        before = [_QUESTION, _dummy(answer, 0, self._thought)]
        try:
            ended = self._write(before, opens=False)
            full = self._write([*before, *_with_ids(answer, 0)])
        except TemplateError as error:
            raise Refused(f"the chat template refuses its answer: {error}") from None
        if not full.startswith(ended):
            roles = ", ".join(each["role"] for each in answer)
            raise Refused(f"the chat template rewrites the turn before answers of {roles}")
        stop = self._stop_text(turn)
        # The policy has sampled the stop token: only what follows it in the closing is appended.
        _, stop_found, rest = self._closing.partition(stop) if stop else ("", "", "")
        text = (rest if stop_found else self._closing) + full[len(ended) :]
        # In some templates, a turn ends with the token that the next message begins with.
        return self._after(stop, text if stop_found else text.removeprefix(stop))

    def _stop_text(self, turn: list[int]) -> str:
        """Return the special token at the end of the turn as text, "" if there is none."""
        text = str(self._tokenizer.decode(turn[-1:], skip_special_tokens=False))
        return text if text in self._special else ""

    def _after(self, stop: str, text: str) -> list[int]:
        """Return the tokens of the text after the stop token; encoded alone, some tokenizers would
        put a space before it."""
        lead, ids = self._ids(stop), self._ids(stop + text)
        return ids[len(lead) :] if ids[: len(lead)] == lead else self._ids(text)

    def _calls(self, tokens: list[int]) -> list[Call]:
        if getattr(self._tokenizer, "response_template", None) is None:
            return super()._calls(tokens)
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return own_calls(self._tokenizer, text, self._opening, self._tools)


def check_appends(
    write: Callable[..., str], thoughts: Sequence[str], *, reads_tools: bool, reads_users: bool
) -> None:
    """Check that the template's text of the whole conversation begins with its text of the first
    messages alone, and that it accepts messages of tools and of users. Raises `UserError`."""
    for description, messages in _conversations(thoughts, reads_tools, reads_users):
        where = f"the chat template, in a conversation with {description}"
        try:
            whole = write(messages, opens=False)
            for place, message in enumerate(messages):
                if message["role"] != "assistant":
                    continue
                asked = write(messages[:place])
                said = write(messages[: place + 1], opens=False)
                for text, begin, what in (
                    (said, asked, "begins the assistant's turn differently when it is complete"),
                    (whole, said, "changes a turn of the assistant when others follow"),
                ):
                    if not text.startswith(begin):
                        seen = _difference(text, begin)
                        raise UserError(f"{where}: {what} ({seen}); {_REMEDY}")
        except TemplateError as error:
            raise UserError(f"{where}: refuses it: {error}") from None


def _conversations(
    thoughts: Sequence[str], reads_tools: bool, reads_users: bool
) -> list[tuple[str, list[Message]]]:
    conversations = []
    for thought in thoughts:
        reasoning = "reasoning and " if thought else ""
        if reads_users:
            messages: list[Message] = []
            for turn in "abc":
                messages.append({"role": "user", "content": f"question {turn}"})
                messages.append(_assistant(f"{thought}answer {turn}"))
            conversations.append((f"{reasoning}turns of the user", messages))
        if reads_tools:
            messages = [_QUESTION]
            for number in range(3):
                answer = [{"role": "tool", "name": "add", "content": "3"}] * (number % 2 + 1)
                messages.append(_dummy(answer, number, thought))
                messages += _with_ids(answer, number)
            messages.append(_assistant(f"{thought}it is done"))
            conversations.append((f"{reasoning}calls of tools", messages))
    return conversations


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _thoughts(write: Callable[..., str], template: str) -> tuple[str, ...]:
    """Return what may begin a turn of the policy: reasoning, nothing, or either of them.

    Some templates begin the turn inside the reasoning, or after it.
    """
    if "think>" not in template and "reasoning" not in template:
        return ("",)
    try:
        begun = write([_QUESTION]).rstrip()
    except TemplateError as error:
        raise UserError(f"the chat template refuses a question: {error}") from None
    if begun.endswith("<think>"):
        return (_THOUGHT,)
    return ("",) if begun.endswith("</think>") else ("", _THOUGHT)


def _dummy(
    answer: list[Message], turn: int, thought: str, arguments: Mapping[str, Any] = NOTHING
) -> Message:
    """Return a turn of the assistant that the answer could follow.

    It has at most one call, because some templates allow no more, and the text after the turn does
    not depend on it.
    """
    message = _assistant(f"{thought}well")
    called = next((each for each in answer if each["role"] == "tool"), None)
    if called is None:
        return message
    function = {"name": called.get("name", "unknown"), "arguments": dict(arguments)}
    call = {"id": _call_id(turn, 0), "type": "function", "function": function}
    return message | {"tool_calls": [call]}


def _with_ids(answer: list[Message], turn: int) -> list[Message]:
    return [
        {"tool_call_id": _call_id(turn, place)} | each if each["role"] == "tool" else each
        for place, each in enumerate(answer)
    ]


def _call_id(turn: int, place: int) -> str:
    return f"call{turn:02d}{place:03d}"  # nine characters, as Mistral's templates require


def _bare(message: Message) -> str:
    content: str = message["content"]
    if message["role"] != "tool":
        return content
    return f"\n<tool_response>\n{content}\n</tool_response>\n"


def _difference(text: str, begin: str) -> str:
    place = next(
        (n for n, (a, b) in enumerate(zip(text, begin, strict=False)) if a != b), len(text)
    )
    return f"{text[place : place + 30]!r} where it was {begin[place : place + 30]!r}"
