"""Makes tokens of what an agent's program asks, and what it is answered of the policy's turn.

A call whose messages begin with those of a turn that it was answered before continues that turn's
tokens, and only the messages after it are encoded. Any other call is encoded as a whole."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from rhymeflow.config import Config
from rhymeflow.data.encode import PromptEncoder, Schema
from rhymeflow.data.prompts import Message, Prompt
from rhymeflow.data.text import GrowingText, before_stop, held_back
from rhymeflow.environments.dialect_answers import ModelTurn, message_of
from rhymeflow.environments.dialects import BadRequest, ModelCall
from rhymeflow.environments.messages import Call
from rhymeflow.environments.parsing import OPEN, PYTHON_OPEN
from rhymeflow.environments.rendering import ChatRenderer
from rhymeflow.environments.template import ADD
from rhymeflow.environments.tools import CallRefused, arguments_of
from rhymeflow.errors import UserError
from rhymeflow.pool import Refused


@dataclass(frozen=True)
class Asking:
    """A call in tokens. `ids` is all that the policy reads, which begins with a prompt of
    `num_prompt` tokens; `new` is what is not in the response yet, and continues what ends at
    `follows` (`store/branches.py`)."""

    ids: list[int]
    new: list[int]
    num_prompt: int
    follows: int


@dataclass(frozen=True)
class AnsweredTurn:
    """A turn of the policy, which ends at position `end` of the response, and the conversation that
    it is the last message of."""

    conversation: list[Message]
    tools: list[Schema]
    asking: Asking
    tokens: list[int]
    end: int

    @property
    def order(self) -> tuple[int, list[int], list[int]]:
        """By which of several turns the best to continue is chosen, whichever came first."""
        return len(self.conversation), self.asking.ids, self.tokens


class Growing:
    """A turn of the policy while it is generated, in tokens and in text without special tokens."""

    def __init__(self, tokenizer: Any, *, has_pieces: bool, stops: Sequence[str]) -> None:
        self._decode, self._has_pieces = tokenizer.decode, has_pieces
        self._stops, self._text = stops, GrowingText(tokenizer.decode)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.pieces: list[str] = []  # the tokens' texts

    def add(self, tokens: list[int], logprobs: list[float]) -> None:
        """Take the next tokens."""
        self.tokens += tokens
        self.logprobs += logprobs
        if self._has_pieces:
            self.pieces += [self._decode([each]) for each in tokens]
        for part in [[each] for each in tokens] if self._stops else [tokens]:
            self._text.add(part)  # as `StopTexts` does

    @property
    def text(self) -> str:
        """The text so far; a character at its end may be there in part only."""
        return self._text.known + self._text.rest

    def before_stop(self) -> tuple[str, str | None]:
        """Return the text before the first stop text, and this; None: there is none."""
        return before_stop(self.text, self._stops)

    def spoken(self, *, has_tools: bool) -> str:
        """Return what is text of the turn whatever follows, and no beginning of a call or a stop
        text."""
        text, stop = before_stop(self._text.known, self._stops)
        if stop is None:
            text = held_back(text, self._stops)
        return held_back(_before_calls(text), (OPEN, PYTHON_OPEN)) if has_tools else text


class Conversations:
    """Renders for one tokenizer. Raises `UserError` if it has no chat template."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise UserError("environment.agent: the model's tokenizer has no chat template")
        self._rollout, self._tokenizer = config.rollout, tokenizer
        self._variables = config.data.chat_template_kwargs
        # Prompts that are too long are refused in the words of the dialect.
        data = config.data.model_copy(update={"max_prompt_length": None})
        self._encoder = PromptEncoder(tokenizer, data)
        self._readers: dict[bool, ChatRenderer] = {}
        self._renderers: dict[tuple[bool, bool], ChatRenderer | None] = {}

    def check(self, call: ModelCall) -> None:
        """Raise `BadRequest` if a call asks for what is not done."""
        for name in ("temperature", "top_p", "top_k"):
            given, ours = getattr(call, name), getattr(self._rollout, name)
            if given is not None and given != ours:
                raise BadRequest(
                    f"{name} is {given:g}, and the run samples with rollout.{name} = {ours:g}: "
                    "leave it out",
                    param=name,
                )
        self._reader(bool(call.tools))

    # -- to tokens ----------------------------------------------------------------------------

    def asking(self, call: ModelCall, known: Sequence[AnsweredTurn]) -> Asking:
        """Return a call in tokens; `known` are the turns so far. Raises `BadRequest`."""
        if call.token_ids is not None:
            return _of_tokens(call.token_ids, known)
        said = call.messages
        begins = [
            each
            for each in known
            if 0 < len(each.conversation) < len(said)
            and each.tools == call.tools
            and said[: len(each.conversation)] == each.conversation
        ]
        if begins:
            best = max(begins, key=lambda each: each.order)
            new = self._appended(said[len(best.conversation) :], best, has_tools=bool(call.tools))
            if new is not None:
                return _continued(best, new)
        try:
            ids = self._encoder.encode(Prompt(0, said, {}, "the messages"), call.tools or None)
        except UserError as error:
            raise BadRequest(str(error)) from None
        return Asking(ids, ids, len(ids), 0)

    def _appended(
        self, messages: list[Message], turn: AnsweredTurn, *, has_tools: bool
    ) -> list[int] | None:
        """Return the tokens that the template appends to the turn; None: it does not append."""
        roles = {each["role"] for each in messages}
        renderer = self._renderer(has_tools, bool(roles - {"tool"}))
        if renderer is None or "assistant" in roles:
            return None
        try:
            return renderer.encode([{**each} for each in messages], turn.tokens)
        except Refused:
            return None  # encoded as a whole, it is what the template makes of it

    def _renderer(self, has_tools: bool, reads_users: bool) -> ChatRenderer | None:
        key = has_tools, reads_users
        if key not in self._renderers:
            tools, variables = [ADD] if has_tools else [], self._variables
            try:
                renderer = ChatRenderer(
                    self._tokenizer, tools, reads_users=reads_users, variables=variables
                )
            except UserError:
                self._renderers[key] = None
            else:
                self._renderers[key] = renderer
        return self._renderers[key]

    # -- from tokens --------------------------------------------------------------------------

    def limit(self, call: ModelCall, asking: Asking, max_completion_length: int) -> int:
        """Return the most tokens of the turn that answers a call; 0 or less: there is no room."""
        room = max_completion_length - (len(asking.ids) - asking.num_prompt)
        return room if call.max_tokens is None else min(room, call.max_tokens)

    def growing(self, call: ModelCall) -> Growing:
        """Return a turn without tokens."""
        return Growing(self._tokenizer, has_pieces=call.wants_logprobs, stops=call.stop)

    def begun(self, call: ModelCall, asking: Asking, growing: Growing, number: int) -> ModelTurn:
        """Return a turn that is not finished, with what is its content whatever follows; `number`
        is the episode's number of it."""
        reader, content = self._reader(bool(call.tools)), ""
        shows_calls = not call.tools or reader.shows_calls
        if shows_calls and not reader.marks_reasoning:  # else text may become something else
            content = growing.spoken(has_tools=bool(call.tools))
        return ModelTurn(
            id=f"turn-{number}",
            prompt_ids=asking.ids,
            tokens=growing.tokens,
            logprobs=growing.logprobs,
            pieces=growing.pieces,
            content=content,
            finish="stop",
        )

    def turn(
        self,
        call: ModelCall,
        asking: Asking,
        growing: Growing,
        number: int,
        finish: Literal["stop", "length"],
    ) -> tuple[ModelTurn, list[Call]]:
        """Return a finished turn as the program gets it, and its calls, those that cannot be read
        included."""
        reader, tokens = self._reader(bool(call.tools)), growing.tokens
        said, parts = reader.said(tokens).calls, reader.parted(tokens)
        schemas = {each["function"]["name"]: each for each in call.tools}
        calls = [_typed(each, schemas) for each in said if not each.error]
        text, stop = growing.before_stop()
        reasoning, content = parts or ("", text)
        if parts is not None and stop is not None:
            rest = growing.text[len(text) :]
            if content:
                content = _without_end(content, rest)
            else:
                reasoning = _without_end(reasoning, rest)
        if calls and parts is None:
            shown = reader.shows_calls
            content = _before_calls(content) if shown else reader.before_calls(tokens)
        turn = msgspec.structs.replace(
            self.begun(call, asking, growing, number),
            content=content,
            reasoning=reasoning,
            calls=calls,
            finish=finish,
            stop=stop,
        )
        return turn, said

    def answered(self, call: ModelCall, asking: Asking, turn: ModelTurn, end: int) -> AnsweredTurn:
        """Return a turn to be continued; it ends at `end` in the response."""
        conversation: list[Message] = []
        if call.token_ids is None:
            conversation = [*call.messages, message_of(call, turn)]
        return AnsweredTurn(conversation, call.tools, asking, turn.tokens, end)

    def _reader(self, has_tools: bool) -> ChatRenderer:
        """Return what reads turns. Raises `BadRequest` if the model's calls cannot be read."""
        if has_tools not in self._readers:
            tools, variables = [ADD] if has_tools else [], self._variables
            try:
                self._readers[has_tools] = ChatRenderer(
                    self._tokenizer, tools, variables=variables, appends=False
                )
            except UserError as error:
                raise BadRequest(str(error)) from None
        return self._readers[has_tools]


def _continued(turn: AnsweredTurn, new: list[int]) -> Asking:
    ids = [*turn.asking.ids, *turn.tokens, *new]
    return Asking(ids, new, turn.asking.num_prompt, turn.end)


def _of_tokens(ids: list[int], known: Sequence[AnsweredTurn]) -> Asking:
    """Return a call that is tokens: it continues the longest sequence that it begins with."""
    wholes = [([*each.asking.ids, *each.tokens], each) for each in known]
    begins = [(len(w), turn) for w, turn in wholes if len(w) < len(ids) and ids[: len(w)] == w]
    if not begins:
        return Asking(ids, ids, len(ids), 0)
    length, best = max(begins, key=lambda each: each[0])
    return _continued(best, ids[length:])


def _before_calls(text: str) -> str:
    """Return what is before the first call; the whole text if there is none."""
    return text.partition(OPEN)[0].partition(PYTHON_OPEN)[0]


def _without_end(text: str, end: str) -> str:
    """Return text without an end whose blanks it may have lost."""
    return text.removesuffix(end if text.endswith(end) else end.rstrip())


def _typed(call: Call, schemas: Mapping[str, Schema]) -> Call:
    """Return a call with arguments of the schema's types, if the policy wrote them as text."""
    if not call.is_text:
        return call
    try:
        return Call(call.name, json.dumps(arguments_of(call, dict(schemas))))
    except (CallRefused, KeyError, TypeError):
        return call  # the program will say what is wrong
