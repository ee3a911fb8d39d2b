"""Guess a number from 1 to 63 by hints.

    prompt      #40417?
    turn        32
    answer      <
    turn        20
    answer      >
    turn        25

The hint says where the hidden number is: `<` means that it is smaller than the guess. A turn that
is not a number is answered by `?`. The episode ends with the right guess, or after six turns, which
is just enough if each guess halves what is left. The number in a prompt only makes it distinct."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

ALPHABET = string.digits + "#?<>"
LARGEST = 63
"""The hidden number is from 1 to this one."""

MAX_TURNS = 6
"""2^6 - 1 = 63: halving finds every number within this many turns."""

UNREADABLE = "?"
_GUESS = re.compile(r"[1-9]\d{0,2}")


def problems(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw `count` problems with distinct prompts: `prompt` and `hidden`, the number.

    The same arguments give the same list, and a shorter list is its beginning. Raises `ValueError`
    for a `count` above 50,000."""
    if count > 50_000:
        raise ValueError(f"there are not {count} distinct games, but 50000")
    noise = random.Random(f"rhymeflow guess {seed}")
    drawn: dict[str, dict[str, Any]] = {}
    while len(drawn) < count:
        prompt, hidden = f"#{noise.randrange(100_000):05d}?", noise.randint(1, LARGEST)
        drawn.setdefault(prompt, {"prompt": prompt, "hidden": hidden})
    return list(drawn.values())


def hint(guess: int, hidden: int) -> str:
    """Return `<` if the hidden number is smaller than a wrong guess, else `>`."""
    return "<" if hidden < guess else ">"


class Environment:
    """One game."""

    def reset(self, *, hidden: int, **_: Any) -> None:
        """Start a problem, given its columns."""
        self._hidden = hidden
        self._turns = 0
        self._reward = 0.0

    def step(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Answer the last message, the policy's turn; None ends the game."""
        turn = messages[-1]["content"]
        self._turns += 1
        is_number = _GUESS.fullmatch(turn) is not None
        if is_number and int(turn) == self._hidden:
            self._reward = 1.0
            return None
        if self._turns == MAX_TURNS:
            return None
        return hint(int(turn), self._hidden) if is_number else UNREADABLE

    def reward(self) -> float:
        """1 if the number was found, else 0."""
        return self._reward
