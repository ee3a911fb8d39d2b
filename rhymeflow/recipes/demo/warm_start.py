"""Training data of the demo's checkpoint: the solutions of a careless teacher.

    rhymeflow sft demo --sft.output_dir DIRECTORY

The teacher forgets every other carry. So the model knows how to write out a sum, finds each term
and ends in time, but is right only about four times in ten. Reinforcement learning, which sees only
the final answer, has to find out that carries matter.

The shipped weights (digest in `warm_start.json`) were made in 1600 steps by an earlier command with
other batches of the same solutions. Another CPU or torch may round to other digits."""

from __future__ import annotations

import random
from typing import Any

from rhymeflow.recipes.demo import task

FORGOTTEN_CARRIES = 0.5


def rows(count: int, seed: int, *, forgotten: float = FORGOTTEN_CARRIES) -> list[dict[str, Any]]:
    """Draw `count` sums with the careless teacher's solutions: `prompt` and `completion`.

    Three quarters of the tokens are of sums with the task's distribution of lengths; in the others
    every length is equally likely. Longer sums have more tokens, so they are drawn less often."""
    noise = random.Random(f"rhymeflow demo, careless {seed}")
    lengths = [problem["terms"] for problem in task.problems(4096, seed)]
    drawn: list[dict[str, Any]] = []
    while len(drawn) < count:
        terms = (
            noise.choice(lengths) if noise.random() < 0.75 else noise.randint(2, len(task.LABELS))
        )
        if noise.random() * terms > 2:  # kept with probability 2 / terms
            continue
        digits = [noise.randrange(10) for _ in range(terms)]
        taught = task.solution(digits, lambda: noise.random() < forgotten)
        drawn.append({"prompt": task.write_prompt(digits), "completion": taught})
    return drawn
