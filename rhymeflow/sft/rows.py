"""Encodes a row as a `Sample`, of which some tokens are in the loss ("learnt").

    {prompt, completion}    learns the completion: text, or the assistant's turns of its messages
    {messages}              learns all turns of the assistant

A turn is encoded as the policy will sample it, and the token that ends it is learnt too."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from rhymeflow.config import DataConfig, SftConfig
from rhymeflow.data.encode import PromptEncoder, Schema
from rhymeflow.data.prompts import Message, Prompt, Row, checked
from rhymeflow.data.text import TemplateError, TokenIds, Unwritable, rendered
from rhymeflow.errors import UserError, nearest
from rhymeflow.learner.sample import Sample

Stretch = tuple[list[int], bool]
"""Consecutive tokens of a conversation, and whether they are learnt (in the loss)."""


class RowError(ValueError):
    """A problem with a row; the message does not name the row yet."""


class RowEncoder:
    """Encodes rows. `stops`: tokens that end a response; `max_length`: the model's context."""

    def __init__(
        self,
        tokenizer: Any,
        data: DataConfig,
        sft: SftConfig,
        stops: Collection[int],
        max_length: int,
    ) -> None:
        if data.assistant_prefix is not None:
            raise UserError("data.assistant_prefix: sft learns completions from their beginning")
        self._tokenizer, self._stops, self._max_length = tokenizer, stops, max_length
        self._prompts, self._ids = PromptEncoder(tokenizer, data), TokenIds(tokenizer)
        self._write = partial(rendered, tokenizer, variables=data.chat_template_kwargs)
        self._data, self._sft = data, sft

    def encode(self, row: Row) -> Sample:
        """Return the row as a sample, in which tokens that are not learnt are marked as observed.
        Raises `UserError` if the row is wrong or too long."""
        try:
            return self._sample(row)
        except TemplateError as error:
            what = f"the chat template refuses the conversation: {error}"
        except (Unwritable, RowError) as error:
            what = str(error)
        raise UserError(f"{row.where}: {what}")

    def _sample(self, row: Row) -> Sample:
        prompt, turns = self._parts(row)
        tools = self._tools(row)
        prompt_ids = self._prompts.encode(prompt, tools)
        conversation = self._prompts.conversation(prompt)
        if conversation is None:
            if tools or any("tool_calls" in turn for turn in turns):
                raise RowError("calls of tools need a model with a chat template")
            stretches = self._plain(turns)
        else:
            stretches = self._rendered(conversation, turns, tools)
        *_, last = (index for index, (_, is_learnt) in enumerate(stretches) if is_learnt)
        stretches = stretches[: last + 1]  # what follows the last turn that is learnt has no use
        ids = [token for tokens, _ in stretches for token in tokens]
        length = len(prompt_ids) + len(ids)
        if length > self._max_length:
            raise RowError(f"is {length} tokens long; the model's context is {self._max_length}")
        observed = [not is_learnt for tokens, is_learnt in stretches for _ in tokens]
        return Sample(
            group=0,
            prompt_ids=prompt_ids,
            completion_ids=ids,
            logprobs=[0.0] * len(ids),
            versions=[0] * len(ids),
            reward=0.0,
            truncated=False,
            observed=observed if any(observed) else [],
        )

    def _parts(self, row: Row) -> tuple[Prompt, list[Message]]:
        values, column, messages = row.values, self._data.prompt_column, self._sft.messages_column
        # Parquet and CSV give every row all columns.
        has_messages, has_prompt = (values.get(name) is not None for name in (messages, column))
        if has_messages and has_prompt:
            raise RowError(f"has {column!r} and {messages!r}; a row has one or the other")
        if has_messages:
            return self._from_messages(row)
        if not has_prompt:
            raise RowError(
                f"has neither {column!r} nor {messages!r}; "
                "data.prompt_column and sft.messages_column name them"
                f"{nearest(column, values)}"
            )
        name = self._sft.completion_column
        if values.get(name) is None:
            raise RowError(
                f"no column {name!r}; sft.completion_column names the one that holds "
                f"what is learnt{nearest(name, values)}"
            )
        prompt = self._prompt(row, column)
        if not isinstance(prompt.prompt, str) and prompt.prompt[-1]["role"] == "assistant":
            raise RowError(f"the prompt ends with the assistant's turn; put that into {name!r}")
        if row.values[name] == "":
            raise RowError(f"column {name!r} is empty, so nothing would be learnt")
        completion = self._prompt(row, name).prompt
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        if completion[0]["role"] != "assistant":
            raise RowError(
                f"column {name!r} begins with a message of "
                f"{completion[0]['role']!r}, not the assistant's; that is part of the prompt"
            )
        return prompt, completion

    def _from_messages(self, row: Row) -> tuple[Prompt, list[Message]]:
        conversation = self._prompt(row, self._sft.messages_column).prompt
        if isinstance(conversation, str):
            raise RowError(f"column {self._sft.messages_column!r}: should be a list of messages")
        roles = [message["role"] for message in conversation]
        if "assistant" not in roles:
            raise RowError("no message is the assistant's, so nothing is learnt")
        first = roles.index("assistant")
        if first == 0:
            raise RowError("begins with the assistant's turn, which answers nothing")
        return Prompt(0, conversation[:first], {}, row.where), conversation[first:]

    def _tools(self, row: Row) -> list[Schema] | None:
        value = row.values.get("tools")
        if isinstance(value, str):
            try:
                value = msgspec.json.decode(value)
            except msgspec.DecodeError as error:
                raise RowError(f"column 'tools': is no JSON: {error}") from None
        if value is not None and not (
            isinstance(value, list) and all(isinstance(each, dict) for each in value)
        ):
            raise RowError("column 'tools': should be a list of JSON schemas")
        return value or None

    def _prompt(self, row: Row, column: str) -> Prompt:
        (prompt,) = checked([Row(row.where, {column: row.values[column]})], column)
        return prompt

    # -- stretches --------------------------------------------------------------------------------

    def _plain(self, turns: Sequence[Message]) -> list[Stretch]:
        end = self._tokenizer.eos_token_id
        if end is None:
            raise RowError("the model's tokenizer has no token that ends a response")
        stretches = list[Stretch]()
        for turn in turns:
            ids, is_learnt = self._ids(turn["content"]), turn["role"] == "assistant"
            if is_learnt and (not ids or ids[-1] not in self._stops):
                ids.append(end)
            stretches.append((ids, is_learnt))
        return stretches

    def _rendered(
        self, so_far: list[Message], turns: Sequence[Message], tools: list[Schema] | None
    ) -> list[Stretch]:
        stretches: list[Stretch] = []
        written = self._write(so_far, tools)
        for turn in turns:
            if turn["role"] == "assistant":
                opening = self._write(so_far, tools)
                stretches.append((self._ids(_rest(opening, written)), False))
                written = self._write([*so_far, turn], tools, opens=False)
                _check_kept(turn, opening, written)
                stretches += self._turn(_rest(written, opening))
            so_far = [*so_far, turn]
        return stretches

    def _turn(self, text: str) -> Iterator[Stretch]:
        """Yield the assistant's turn up to its end token, then the template's text after it."""
        ids = self._ids(text)
        ends = [index for index, token in enumerate(ids) if token in self._stops]
        if not ends:
            raise RowError(
                "the chat template ends the assistant's turn with no token that "
                "ends a response (eos_token_id), so the policy would not learn to stop"
            )
        begin = end = ends[-1]
        while begin - 1 in ends:  # the turn's text ends with an end token, and the template's too
            begin -= 1
        yield [*ids[:begin], ids[end]], True
        yield ids[end + 1 :], False


def _check_kept(turn: Message, opening: str, written: str) -> None:
    """Raise `RowError` if the template does not write all of a turn; blanks do not matter."""
    parts = [turn.get(name) for name in ("content", "reasoning_content", "reasoning", "thinking")]
    for call in turn.get("tool_calls", ()):
        parts.append(call.get("function", call)["name"])
    before, text = _without_blanks(opening), _without_blanks(written)
    for part in map(str, filter(None, parts)):
        if text.count(_without_blanks(part)) <= before.count(_without_blanks(part)):
            raise RowError(
                "the chat template does not write all of a turn that is to be "
                f"learnt ({part[:40]!r}): it drops reasoning or tool calls; "
                "data.chat_template = FILE gives a template that keeps them"
            )


def _without_blanks(text: str) -> str:
    return "".join(text.split())


def _rest(text: str, beginning: str) -> str:
    if not text.startswith(beginning):
        raise RowError(
            "the chat template changes earlier turns when one is added (perhaps it drops "
            "reasoning), so the policy would not read what is learnt here; "
            "data.chat_template = FILE gives a template that only appends"
        )
    return text[len(beginning) :]
