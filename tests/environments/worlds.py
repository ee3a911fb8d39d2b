"""Environments and tools that behave and misbehave; loaded by the processes, not by the tests."""

import asyncio
import ctypes
import os
import random
import sys
import time
from pathlib import Path

FILE = Path(__file__)


class Echo:
    """Answers what it was told; a word of the turn makes it do something else."""

    def __init__(self, greeting: str = "") -> None:
        self.greeting, self.turns, self.closed = greeting, 0, None

    def reset(self, seed: int, prompt, colour: str = "none", log: str | None = None) -> None:
        self.random, self.colour, self.log = random.Random(seed), colour, log
        self.note(f"reset {seed} {prompt} {colour}")

    def note(self, line: str) -> None:
        if self.log is not None:
            with Path(self.log).open("a") as file:
                file.write(line + "\n")

    def step(self, messages):  # noqa: C901 - a table
        said = messages[-1]["content"]
        self.turns += 1
        self.note(f"step {said}")
        match said.split()[0]:
            case "raise":
                raise ValueError("no, thank you")
            case "hang":
                time.sleep(1000)
            case "c":
                ctypes.PyDLL(None).sleep(1000)  # holds the interpreter's lock
            case "exit":
                os._exit(3)
            case "long":
                return "x" * 1_000_000
            case "nonsense":
                return 7
            case "bye":
                return None
            case "answer":
                return [{"role": "narrator", "content": "So it goes."}]
            case "slow":
                time.sleep(0.3)
            case "seed":
                return f"{self.random.random()}"
            case "pid":
                return f"{os.getpid()}"
            case "count":
                return f"{len(messages)} {self.turns}"
        return f"{self.greeting}{said}"

    def reward(self):
        return {"red": 1.5, "nan": float("nan"), "nothing": None}.get(self.colour, self.turns)

    def close(self):
        self.note("close")
        if self.colour == "clinging":
            time.sleep(1000)
        raise RuntimeError("closing is hard")


class Async:
    """The same in a loop."""

    async def reset(self) -> None:
        await asyncio.sleep(0)

    async def step(self, messages):
        match messages[-1]["content"].split():
            case ["wait", seconds]:
                await asyncio.sleep(float(seconds))
            case ["stubborn"]:
                while True:
                    try:
                        await asyncio.sleep(1000)
                    except asyncio.CancelledError:
                        continue
            case ["pid"]:
                return f"{os.getpid()}"
            case ["cancel"]:
                raise asyncio.CancelledError
        return "done"

    async def reward(self):
        return 1


class Sleeper:
    def reset(self, **columns) -> None:
        pass

    def step(self, messages):
        time.sleep(0.2)


class Opens:
    def reset(self):
        return "Welcome."

    def step(self, messages):
        return messages[0]["content"]


class Needy:
    def reset(self, word):
        self.word = word

    def step(self, messages):
        return self.word


class Counter:
    """TRL's way."""

    def __init__(self, step: int = 1) -> None:
        self.size = step

    def reset(self, start: int = 0, **columns) -> None:
        self.value = start

    def add(self, amount: int, times: int = 1) -> int:
        """Add to the counter.

        Args:
            amount: what is added.
            times: how often."""
        self.value += amount * times * self.size
        return self.value

    async def fail(self) -> str:
        """Fail."""
        raise RuntimeError(f"at {self.value}")

    def get_reward(self) -> float:
        return float(self.value)


def multiply(a: float, b: float) -> float:
    """Multiply two numbers.

    Args:
        a: the first.
        b: the second."""
    return a * b


def plot(function: str, self: str) -> str:
    """Plot.

    Args:
        function: of x.
        self: a parameter as any other."""
    return function + self


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: the first.
        b: the second."""
    return a + b


def undocumented(a: float) -> float:
    return a


def untyped(a):
    """Do something.

    Args:
        a: what."""
    return a


def leave() -> None:
    """Leave."""
    sys.exit("left")


def breaks():
    """Makes no environment."""
    raise ValueError("no server")


def counter():
    """Makes an environment, and is no class."""
    return Counter()
