"""Guess a number from 1 to 63 by hints.

    prompt      #40417?
    turn        32
    answer      <
    turn        20
    answer      >
    turn        25

The hint is the hidden number's side of the guess: `<` says that it is smaller. What is no number is
answered by `?`. The episode ends with the right guess, or after six turns: just enough for who
always halves what is left. A prompt's number means nothing, it only makes prompts distinct.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

ALPHABET = string.digits + "#?<>"
LARGEST = 63
"""Numbers from 1 to this one are guessed."""

MAX_TURNS = 6
"""2^6 - 1 = 63: halving finds every number within so many turns."""

UNREADABLE = "?"
_GUESS = re.compile(r"[1-9]\d{0,2}")


def problems(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw `count` problems with distinct prompts: `prompt` and `hidden`, the number.

    The same arguments give the same list, and a shorter list is its beginning. Raises `ValueError`
    if there are not so many prompts.
    """
    if count > 50_000:
        raise ValueError(f"there are not {count} distinct games, but 50000")
    noise = random.Random(f"rhymeflow guess {seed}")
    drawn: dict[str, dict[str, Any]] = {}
    while len(drawn) < count:
        prompt, hidden = f"#{noise.randrange(100_000):05d}?", noise.randint(1, LARGEST)
        drawn.setdefault(prompt, {"prompt": prompt, "hidden": hidden})
    return list(drawn.values())


def hint(guess: int, hidden: int) -> str:
    """The side of a wrong guess on which the hidden number is."""
    return "<" if hidden < guess else ">"


class Environment:
    """One game."""

    def reset(self, *, hidden: int, **_: Any) -> None:
        """Begin with the problem whose columns these are."""
        self._hidden = hidden
        self._turns = 0
        self._reward = 0.0

    def step(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Answer the last message, the policy's turn; `None`: the game is over."""
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
