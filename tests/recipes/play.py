"""Episodes of recipes' environments, played by messages that are already written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Messages = list[dict[str, str]]


def replay(environment: Any, problem: Mapping[str, Any], messages: Iterable[Mapping[str, str]]):
    """Play the assistant's turns; the answers have to be those written. Return the reward."""
    begin(environment, problem)
    seen: Messages = []
    answer: str | None = ""
    for message in messages:
        if message["role"] == "assistant":
            assert answer is not None, "a turn after the end"
            seen.append(dict(message))
            answer = environment.step(seen)
        else:
            assert message["content"] == answer
            seen.append(dict(message))
    assert answer is None, "the episode is not over"
    return environment.reward()


def play(environment: Any, problem: Mapping[str, Any], policy: Callable[[Messages], str]):
    """Play by a policy of the messages so far; return the reward and the messages."""
    begin(environment, problem)
    seen: Messages = []
    while True:
        seen.append({"role": "assistant", "content": policy(seen)})
        answer = environment.step(seen)
        if answer is None:
            return environment.reward(), seen
        seen.append({"role": "user", "content": answer})


def begin(environment: Any, problem: Mapping[str, Any]) -> None:
    environment.reset(**{name: value for name, value in problem.items() if name != "prompt"})
