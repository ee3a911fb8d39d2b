"""What a user writes to answer the policy between its turns.

A class with these methods need not derive from `Environment`. Each may be `async def`; those that
are not run in a thread of the environment's own, always the same one.
"""

from __future__ import annotations

from typing import Any

from rhymeflow.data.prompts import Message as Message


class Environment:
    """Answers one response of the policy, turn by turn. Each response gets an object of its own.

    It may be made anew and brought to where it was by `reset` and the same turns, after which its
    answers must be what they were: whatever is random comes from `seed`.
    """

    def reset(self, **columns: Any) -> str | None:
        """Begin, with the columns of the prompt's row that the signature names (`**` takes all).

        If it names `seed`, it is given an int made of `run.seed`, the row and the epoch, the same
        for all responses to the prompt; if it names `prompt`, the prompt. A column of
        such a name takes precedence. Text that it returns is put after the prompt (after its last
        message of the user's).
        """
        return None

    def step(self, messages: list[Message]) -> list[Message] | str | None:
        """Answer the last of `messages`, the conversation so far, which is the policy's turn.

        Text is a message of the user's, or, where the prompt is text and not a conversation, what
        the policy reads as it is. None: the episode is over.
        """
        raise NotImplementedError

    def reward(self) -> float | None:
        """Judge the episode, which is over; None: it has no reward of the environment's."""
        return None

    def close(self) -> None:
        """Give back what it has. Called once, whatever happened before."""
