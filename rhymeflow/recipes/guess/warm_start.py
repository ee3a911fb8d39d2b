"""Training data of the checkpoint of `guess`: the games of a careless teacher.

    rhymeflow sft guess --sft.output_dir DIRECTORY

The teacher begins in the middle and follows every hint, but mostly goes only one step in its
direction; otherwise it halves what is left. So the model knows the rules and the middles, and finds
a third of the numbers in time. Reinforcement learning has to find out that halving is quicker."""

from __future__ import annotations

import random
from typing import Any

from rhymeflow.recipes.guess import task

SMALL_STEPS = 0.6


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw `count` games of the careless teacher, as messages."""
    noise = random.Random(f"rhymeflow guess, careless {seed}")
    return [
        {"prompt": each["prompt"], "completion": played(each["hidden"], noise)}
        for each in task.problems(count, seed)
    ]


def played(hidden: int, noise: random.Random) -> list[dict[str, str]]:
    """Return the careless teacher's turns and the hints."""
    messages: list[dict[str, str]] = []
    lowest, highest, guess, step = 1, task.LARGEST, 0, 0
    for turn in range(1, task.MAX_TURNS + 1):
        is_small = turn > 1 and noise.random() < SMALL_STEPS
        guess = guess + step if is_small else (lowest + highest) // 2
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == hidden or turn == task.MAX_TURNS:
            break
        answer = task.hint(guess, hidden)
        messages.append({"role": "user", "content": answer})
        if answer == "<":
            highest, step = guess - 1, -1
        else:
            lowest, step = guess + 1, 1
    return messages
