"""What the demo's checkpoint was taught: the solutions of a careless teacher.

    rhymeflow sft demo --sft.output_dir DIRECTORY

The teacher forgets every other carry. So the model knows how a sum is written out, finds each term
and ends in time, but is right only about four times in ten: what is left for reinforcement
learning, which sees nothing but the final answer, is to find out that carries matter.

The shipped weights were made by an earlier command with other batches of the same solutions, in
1600 steps; `warm_start.json` has their digest. Another CPU or torch may round differently and so
give other digits with the same behaviour.
"""

from __future__ import annotations

import random
from typing import Any

from rhymeflow.recipes.demo import task

FORGOTTEN_CARRIES = 0.5


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw `count` sums with the careless teacher's solutions: `prompt` and `completion`.

    Three quarters of the tokens are of sums as long as the task draws them, the others of lengths
    that are all as likely, so that every length is covered. A longer sum has more tokens, so it is
    drawn less often.
    """
    noise = random.Random(f"rhymeflow demo, careless {seed}")
    lengths = [problem["terms"] for problem in task.problems(4096, seed)]
    drawn: list[dict[str, Any]] = []
    while len(drawn) < count:
        terms = (
            noise.choice(lengths) if noise.random() < 0.75 else noise.randint(2, len(task.LABELS))
        )
        if noise.random() * terms > 2:
            continue
        digits = [noise.randrange(10) for _ in range(terms)]
        taught = task.solution(digits, lambda: noise.random() < FORGOTTEN_CARRIES)
        drawn.append({"prompt": task.write_prompt(digits), "completion": taught})
    return drawn
