"""Training data of the checkpoint of `tools`: the turns of a careless teacher.

    rhymeflow sft tools --sft.output_dir DIRECTORY

The teacher mostly adds what it should subtract, sometimes answers before it has used all numbers,
and now and then drops a character of a call. So the model knows how to call, copies numbers and
ends in time, but is right only about three times in ten: reinforcement learning has to find out
that signs matter, and all numbers."""

from __future__ import annotations

import random
from typing import Any

from rhymeflow.recipes.tools import task

FORGOTTEN_SIGNS = 0.6
EARLY_ANSWERS = 0.3
DROPPED_CHARACTERS = 0.04


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw `count` problems with the careless teacher's turns, as messages."""
    noise = random.Random(f"rhymeflow tools, careless {seed}")
    return [
        {"prompt": each["prompt"], "completion": played(task.read_prompt(each["prompt"]), noise)}
        for each in task.problems(count, seed)
    ]


def played(terms: list[int], noise: random.Random) -> list[dict[str, str]]:
    """Return the careless teacher's turns and the answers; the last turn ends the episode."""
    messages: list[dict[str, str]] = []
    total = str(terms[0])
    left = f"a{total}"
    for label, term in zip(task.LABELS[1:], terms[1:], strict=False):
        if messages and noise.random() < EARLY_ANSWERS:
            break
        used = abs(term) if noise.random() < FORGOTTEN_SIGNS else term
        call = f"[{left} {task.write_term(label, used)}]"
        if noise.random() < DROPPED_CHARACTERS:
            at = noise.choice([call.index(" "), call.index(label, 2), len(call) - 1])
            messages += _exchange(call[:at] + call[at + 1 :])
        messages += _exchange(call)
        left = total = messages[-1]["content"].removesuffix("\n")
    return [*messages, {"role": "assistant", "content": f"={total}"}]


def _exchange(turn: str) -> list[dict[str, str]]:
    answer = {"role": "user", "content": task.calculate(turn)}
    return [{"role": "assistant", "content": turn}, answer]
