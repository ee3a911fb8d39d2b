"""Splits a response's tokens into turns of the policy and of an environment. An environment's turn
becomes messages only if they give the same tokens when they are encoded as the run does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from rhymeflow.data.prompts import Message
from rhymeflow.data.text import special_tokens
from rhymeflow.environments.rendering import ChatRenderer
from rhymeflow.pool import Refused
from rhymeflow.store.reader import StoredSegment

_MARKS = ("rhymeflowfirst", "rhymeflowsecond")
_ROLES = ("tool", "user")
"""Roles of answers, in the order in which they are tried: some templates write a tool's answer as a
user's, with more around it."""


class Turn(NamedTuple):
    """Consecutive tokens of the policy, or of an environment (`is_observed`)."""

    is_observed: bool
    tokens: list[int]


def turns_of(segments: Sequence[StoredSegment]) -> list[Turn]:
    """Return the turns of a response; empty if its tokens were deleted."""
    if not all(segment.tokens for segment in segments):
        return []
    return [
        Turn(is_observed, [token for segment in turn for token in segment.tokens])
        for is_observed, turn in groupby(segments, attrgetter("is_observed"))
    ]


class TurnReader:
    """Converts turns to text and messages; `tokenizer` is the policy's."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._special = tokenizer, special_tokens(tokenizer)
        self._renderer: ChatRenderer | None = None

    def shown(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        """Return {role, text, length} of each turn: role `assistant` or `environment`, text without
        special tokens, length in tokens."""
        return [
            {
                "role": "environment" if turn.is_observed else "assistant",
                "text": self._tokenizer.decode(turn.tokens, skip_special_tokens=True),
                "length": len(turn.tokens),
            }
            for turn in turns
        ]

    def messages(self, turns: Sequence[Turn], *, is_chat: bool) -> list[Message] | None:
        """Return messages of the assistant, and of a user or tools between them. `is_chat`: whether
        the prompt went through the chat template; if not, an environment's turn is a user's text.
        `None`: no messages give the tokens of an environment's turn."""
        messages: list[Message] = []
        policy_turn: list[int] = []
        for turn in turns:
            if not turn.is_observed:
                policy_turn = turn.tokens
                messages.append({"role": "assistant", "content": self._policy_text(policy_turn)})
            elif not is_chat:
                messages.append({"role": "user", "content": self._text(turn.tokens)})
            elif (answer := self._answer(turn.tokens, policy_turn)) is not None:
                messages += answer
            else:
                return None
        return messages

    def _policy_text(self, tokens: list[int]) -> str:
        """Return the text of a turn of the policy, without the token that ends it."""
        ends = self._text(tokens[-1:]) in self._special
        return self._text(tokens[:-1] if ends else tokens)

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def _answer(self, observed: list[int], policy_turn: list[int]) -> list[Message] | None:
        if self._renderer is None:
            self._renderer = ChatRenderer(self._tokenizer, reads_users=False)
        text = self._text(observed)
        for role in _ROLES:
            try:
                contents = self._contents(text, role, policy_turn)
                messages: list[Message] = [{"role": role, "content": c} for c in contents]
                if messages and self._renderer.encode(list(messages), policy_turn) == observed:
                    return messages
            except Refused:  # the template has no such role
                continue
        return None

    def _contents(self, text: str, role: str, policy_turn: list[int]) -> list[str]:
        """Return the contents of the messages in `text`; empty if the template did not write it.
        What it writes around and between two known messages shows where contents begin and end."""
        assert self._renderer is not None
        marked = [
            self._text(
                self._renderer.encode([{"role": role, "content": m} for m in marks], policy_turn)
            )
            for marks in (_MARKS[:1], _MARKS)
        ]
        before, alone, after = marked[0].partition(_MARKS[0])
        _, first, rest = marked[1].partition(_MARKS[0])
        between, second, _ = rest.partition(_MARKS[1])
        if not (alone and first and second and between):
            return []
        is_framed = text.startswith(before) and text.endswith(after)
        if not is_framed or len(text) < len(before) + len(after):
            return []
        return text[len(before) : len(text) - len(after)].split(between)
