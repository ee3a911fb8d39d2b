"""Environments for runs with turns, loaded by the environment worker; what they say is a function
of what they are told, so that a test can say it again."""

import asyncio
from typing import Any

TURNS = 3


def answer(turn: str, column: str) -> str:
    """What is said to a turn: never empty, and now and then a text that ends a turn."""
    return f"{sum(map(ord, turn)) % 97}{column}?"


class Talker:
    """Answers twice, with what follows from the turn and the row's column."""

    def reset(self, *, answer: str, **_: Any) -> None:
        self.answer, self.turns, self.even = answer, 0, 0

    def step(self, messages: list[dict[str, str]]) -> str | None:
        said = messages[-1]["content"]
        self.turns += 1
        self.even += sum(c in "02468" for c in said)
        return answer(said, self.answer) if self.turns < TURNS else None

    def reward(self) -> float:
        return self.even / 10


class Slow(Talker):
    """Takes its time, as what asks the network does."""

    async def step(self, messages: list[dict[str, str]]) -> str | None:  # type: ignore[override]
        await asyncio.sleep(0.2)
        return super().step(messages)


class Opener(Talker):
    """Says something first."""

    def reset(self, *, answer: str, seed: int, **_: Any) -> str:  # type: ignore[override]
        super().reset(answer=answer)
        return f"{seed % 7}="
