"""A program of an agent for runs of a tiny model, whose alphabet is digits and signs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.environments.programs import ask, read_stream, user


def calls(base_url: str, row: dict[str, Any]) -> float:
    """Two turns, the second of them asked in another way too, and another conversation, all at
    once; what they say is judged."""
    begin = [user(row["prompt"])]
    text = "".join(read_stream(base_url, begin, max_tokens=10, stop=["3", "+1"]))
    first = {"role": "assistant", "content": text}
    asked = ([*begin, first, user("1?")], [*begin, first, user("2+2?")], [user("3=")])
    with ThreadPoolExecutor() as pool:
        said = [first, *pool.map(lambda each: ask(base_url, each, max_tokens=8), asked)]
    text = "".join(each["content"] for each in said)
    return sum(each in "02468" for each in text) / 10


def fails(base_url: str, row: dict[str, Any]) -> float:
    """Raises after a turn."""
    ask(base_url, [user(row["prompt"])])
    raise RuntimeError("no more")
