"""The sequences of an agent's response, which is stored as one row of tokens in order of time.

A call of the program is an observation that `follows` the tokens up to a position, where another
turn of the policy ended; 0: it begins with nothing before it. The policy's turn comes after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Asked(NamedTuple):
    """A call, as the tokens from `start` to `end` of the row."""

    start: int
    end: int
    follows: int


def stretches(calls: Sequence[Asked], position: int) -> list[tuple[int, int]]:
    """Return what precedes `position` in its sequence: stretches of the row, each a call and the
    turn that answers it. `calls` are in order of time, the first at 0."""
    found: list[tuple[int, int]] = []
    while position > 0:
        call = next(each for each in reversed(calls) if each.start < position)
        found.append((call.start, position))
        position = call.follows
    return found[::-1]


def sequences(calls: Sequence[Asked], length: int) -> list[list[tuple[int, int]]]:
    """Return the stretches of each sequence of a row of `length` tokens, in the order in which they
    ended: those of turns that no call follows. What ends with a call is none."""
    ends = [*(each.start for each in calls[1:]), length]
    turns = [(call, end) for call, end in zip(calls, ends, strict=True) if end > call.end]
    followed = {call.follows for call, _ in turns}
    return [stretches(calls, end) for _, end in turns if end not in followed]
