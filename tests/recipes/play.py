"""Episodes of recipes' environments, played by messages that are already written."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Messages = list[dict[str, str]]


def play(
    environment: Any, problem: Mapping[str, Any], policy: Callable[[Messages], str]
) -> tuple[float, Messages]:
    """Play by a policy of the messages so far; return the reward and the messages."""
    environment.reset(**{name: value for name, value in problem.items() if name != "prompt"})
    seen: Messages = []
    while True:
        seen.append({"role": "assistant", "content": policy(seen)})
        answer = environment.step(seen)
        if answer is None:
            return environment.reward(), seen
        seen.append({"role": "user", "content": answer})


def replay(environment: Any, problem: Mapping[str, Any], messages: Iterable[Mapping[str, str]]):
    """Play the assistant's turns; the answers have to be those written. Return the reward."""
    turns = iter([each["content"] for each in messages if each["role"] == "assistant"])
    reward, played = play(environment, problem, lambda _: next(turns))
    assert played == list(messages)
    return reward
