"""A response's tokens as turns of the policy and of an environment. An environment's turn becomes
messages only if these, encoded as the run encodes answers, give the same tokens."""

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
"""Roles of answers in the order of trial: some templates write a tool's answer as a user's, with
more around it."""


class Turn(NamedTuple):
    """Consecutive tokens of the policy, or of an environment (`is_observed`)."""

    is_observed: bool
    tokens: list[int]


def turns_of(segments: Sequence[StoredSegment]) -> list[Turn]:
    """Return the turns of a response; empty if its tokens were deleted."""
    if not all(segment.tokens for segment in segments):
        return []
    return [
        Turn(is_observed, [token for segment in those for token in segment.tokens])
        for is_observed, those in groupby(segments, attrgetter("is_observed"))
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
        """Return messages of the assistant, and of a user or tools between them.

        `is_chat`: whether the prompt went through the chat template; if not, an answer is a user's
        text. `None`: the template writes no message that is this answer.
        """
        found: list[Message] = []
        said: list[int] = []
        for turn in turns:
            if not turn.is_observed:
                said = turn.tokens
                found.append({"role": "assistant", "content": self._said(said)})
            elif not is_chat:
                found.append({"role": "user", "content": self._text(turn.tokens)})
            elif (answer := self._answer(turn.tokens, said)) is not None:
                found += answer
            else:
                return None
        return found

    def _said(self, tokens: list[int]) -> str:
        """The text of a turn of the policy, without the token that ends it."""
        ends = self._text(tokens[-1:]) in self._special
        return self._text(tokens[:-1] if ends else tokens)

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def _answer(self, observed: list[int], said: list[int]) -> list[Message] | None:
        if self._renderer is None:
            self._renderer = ChatRenderer(self._tokenizer, reads_users=False)
        text = self._text(observed)
        for role in _ROLES:
            try:
                contents = self._contents(text, role, said)
                messages: list[Message] = [{"role": role, "content": each} for each in contents]
                if messages and self._renderer.encode(list(messages), said) == observed:
                    return messages
            except Refused:  # the template has no such role
                continue
        return None

    def _contents(self, text: str, role: str, said: list[int]) -> list[str]:
        """The texts where the template writes the contents of messages; empty if the template did
        not write `text`."""
        assert self._renderer is not None
        marked = [
            self._text(
                self._renderer.encode([{"role": role, "content": mark} for mark in marks], said)
            )
            for marks in (_MARKS[:1], _MARKS)
        ]
        before, found, after = marked[0].partition(_MARKS[0])
        _, both, rest = marked[1].partition(_MARKS[0])
        between, also, _ = rest.partition(_MARKS[1])
        if not (found and both and also and between):
            return []
        if len(text) < len(before) + len(after) or not text.startswith(before):
            return []
        if not text.endswith(after):
            return []
        return text[len(before) : len(text) - len(after)].split(between)
