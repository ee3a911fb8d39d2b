"""A program of an agent for runs of a tiny model, whose alphabet is digits and signs."""

from __future__ import annotations

from typing import Any

from tests.environments.programs import ask, user


def calls(base_url: str, row: dict[str, Any]) -> float:
    """Two turns, the second of them asked in another way too, and another conversation; what they
    say is judged."""
    begin = [user(row["prompt"])]
    first = ask(base_url, begin, max_tokens=10)
    said = [first]
    said.append(ask(base_url, [*begin, first, user("1?")], max_tokens=8))
    said.append(ask(base_url, [*begin, first, user("2+2?")], max_tokens=8))
    said.append(ask(base_url, [user("3=")], max_tokens=3))
    text = "".join(each["content"] for each in said)
    return sum(each in "02468" for each in text) / 10


def fails(base_url: str, row: dict[str, Any]) -> float:
    """Raises after a turn."""
    ask(base_url, [user(row["prompt"])])
    raise RuntimeError("no more")
