"""Add and subtract numbers with a calculator, since they are too long for mental arithmetic.

    prompt      a48213 b+9977 c-31415?
    turn        [a48213 b+9977]
    answer      58190
    turn        [58190 c-31415]
    answer      26775
    turn        =26775

A call is one operation; two to seven numbers take one to six calls. A turn that begins with `=`
ends the episode, and its number is judged. Any other turn that is not a call is answered by `?`."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

LABELS = string.ascii_lowercase[:7]
"""One label per number, so there are at most seven."""

ALPHABET = string.digits + LABELS + " +-[]=?\n"
MOST_DIGITS = 5  # of each number
UNREADABLE = "?\n"
_CALL = re.compile(r"\[[a-g]?(-?\d{1,9}) [a-g]([+-])(\d{1,9})\]")
_END = re.compile(r"=(-?\d+)")


def problems(
    count: int, seed: int, *, min_numbers: int = 2, max_numbers: int = 7
) -> list[dict[str, Any]]:
    """Draw `count` distinct problems: `prompt`, `answer` (a decimal string) and `calls`.

    Short sums are somewhat likelier than long ones. A number is subtracted with probability 2/3, if
    that does not make the running total negative. The same arguments give the same list, and a
    shorter list is its beginning. Raises `ValueError` if the bounds are impossible."""
    if not 2 <= min_numbers <= max_numbers <= len(LABELS):
        raise ValueError(
            f"need 2 <= min_numbers <= max_numbers <= {len(LABELS)}, not "
            f"{min_numbers}, {max_numbers}"
        )
    noise = random.Random(f"rhymeflow tools {seed}")
    drawn: dict[str, dict[str, Any]] = {}
    lengths = range(min_numbers, max_numbers + 1)
    weights = [0.8**length for length in lengths]
    while len(drawn) < count:
        (length,) = noise.choices(lengths, weights)
        terms = [_number(noise)]
        while len(terms) < length:
            number = _number(noise)
            takes_away = noise.random() < 2 / 3 and number <= sum(terms)
            terms.append(-number if takes_away else number)
        prompt = write_prompt(terms)
        drawn.setdefault(prompt, {"prompt": prompt, "answer": str(sum(terms)), "calls": length - 1})
    return list(drawn.values())


def _number(noise: random.Random) -> int:
    """Draw a number of three to five digits, each length equally likely."""
    power = noise.randint(2, MOST_DIGITS - 1)
    return noise.randrange(10**power, 10 ** (power + 1))


def write_prompt(terms: Sequence[int]) -> str:
    """Return the problem as the policy reads it."""
    first, *others = terms
    rest = "".join(f" {write_term(label, n)}" for label, n in zip(LABELS[1:], others, strict=False))
    return f"a{first}{rest}?"


def write_term(label: str, number: int) -> str:
    """Return a number to be added or subtracted, as prompts and calls write it."""
    return f"{label}{number:+d}"


def read_prompt(prompt: str) -> list[int]:
    """Return the numbers of a prompt of `write_prompt`, with their signs."""
    return [int(term[1:]) for term in prompt.removesuffix("?").split(" ")]


def calculate(turn: str) -> str:
    """Return what the calculator answers to a turn."""
    call = _CALL.fullmatch(turn)
    if call is None:
        return UNREADABLE
    left, sign, right = call.groups()
    return f"{int(left) + int(sign + right)}\n"


class Environment:
    """One episode: a problem and the calls made for it."""

    def reset(self, *, answer: str, **_: Any) -> None:
        """Start a problem, given its columns."""
        self._answer = answer
        self._reward = 0.0

    def step(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Answer the last message, the policy's turn; `None`: the episode is over."""
        turn = messages[-1]["content"]
        if not turn.startswith("="):
            return calculate(turn)
        end = _END.fullmatch(turn)
        self._reward = float(end is not None and end[1] == self._answer)
        return None

    def reward(self) -> float:
        """1 if the policy gave the right number in the end, else 0."""
        return self._reward
