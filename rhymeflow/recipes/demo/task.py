"""The demo's task: add up a row of labelled digits, and write out the running totals.

    prompt      a3 b9 c4?
    response    a3+0=3 b9+3=12 c4+12=16 =16

A term takes about nine characters, so a response is 16 to 441 tokens long. The number of
terms is log-normal: most sums are short and a few are very long, as with reasoning models. Only
the final answer is scored, as right or wrong."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

LABELS = string.ascii_lowercase + string.ascii_uppercase[:16]
"""One label per term, so the longest sum has 42 terms."""

ALPHABET = string.digits + LABELS + " +=?"
_ANSWER = re.compile(r" =(\d+)$")


def problems(
    count: int, seed: int, *, min_terms: int = 2, max_terms: int = 42, median_terms: float = 4.0
) -> list[dict[str, Any]]:
    """Draw `count` distinct problems: `prompt`, `answer` (a decimal string) and `terms`.

    The number of terms is `min_terms` plus a log-normal with the given overall median, cut at
    `max_terms`. The same arguments give the same list, and a shorter list is its beginning.
    Raises `ValueError` if the bounds are impossible or allow fewer than `count` problems."""
    if not 1 <= min_terms < median_terms <= max_terms <= len(LABELS):
        raise ValueError(
            f"need 1 <= min_terms < median_terms <= max_terms <= {len(LABELS)}, not "
            f"{min_terms}, {median_terms}, {max_terms}"
        )
    if count > 10**max_terms // 2:
        raise ValueError(f"there are not {count} distinct sums of at most {max_terms} digits")
    noise = random.Random(f"rhymeflow demo {seed}")
    drawn: dict[str, dict[str, Any]] = {}
    while len(drawn) < count:
        extra = (median_terms - min_terms) * noise.lognormvariate(0.0, 1.2)
        digits = [noise.randrange(10) for _ in range(min(min_terms + int(extra), max_terms))]
        prompt = write_prompt(digits)
        drawn.setdefault(
            prompt, {"prompt": prompt, "answer": str(sum(digits)), "terms": len(digits)}
        )
    return list(drawn.values())


def write_prompt(digits: Sequence[int]) -> str:
    """Return the problem as the model reads it."""
    return " ".join(f"{label}{digit}" for label, digit in zip(LABELS, digits, strict=False)) + "?"


def read_prompt(prompt: str) -> list[int]:
    """Return the digits of a prompt of `write_prompt`."""
    return [int(term[1:]) for term in prompt.removesuffix("?").split(" ")]


def solution(digits: Sequence[int], forgets: Callable[[], bool] = lambda: False) -> str:
    """Return the reference response with all running totals.

    `forgets` is called at each carry; if it returns true the carry is left out: 7 + 5 is 2, and
    17 + 5 is 12."""
    total, steps = 0, []
    for label, digit in zip(LABELS, digits, strict=False):
        carries = total % 10 + digit > 9
        after = total + digit - (10 if carries and forgets() else 0)
        steps.append(f"{label}{digit}+{total}={after}")
        total = after
    return " ".join(steps) + f" ={total}"


def reward(
    prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[str], **_: Any
) -> list[float]:
    """Return 1 for each completion that ends with the right answer, else 0."""
    return [
        float((found := _ANSWER.search(completion)) is not None and found[1] == right)
        for completion, right in zip(completions, answer, strict=True)
    ]
