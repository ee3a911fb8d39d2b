"""Reward functions written for verl: `compute_score(data_source, solution_str, ground_truth, ...)`.

Known by its parameters, whatever its name: one response a call, the text without special tokens. A
dictionary that it returns has the reward as `score`; what else is in it is for verl's log.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rhymeflow.reward.builtin import content
from rhymeflow.utils.arguments import Arguments

ABSENT = ("data_source", "extra_info")
"""What verl always gives a function, and other data may lack: it is None then."""

VERL_GIVES = ("solution_str", *ABSENT)


def is_verl(function: Callable[..., Any]) -> bool:
    """Whether the function takes what verl gives, and not what TRL does."""
    names = Arguments(function).names
    return "solution_str" in names and "ground_truth" in names and "completions" not in names


def adapted(function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function as TRL would call it, with these options bound."""
    takes = Arguments(function)
    always = takes.chosen(dict.fromkeys(ABSENT))

    async def score(completions: list[Any], **columns: Any) -> list[Any]:
        found = []
        for number, completion in enumerate(completions):
            row = {name: values[number] for name, values in columns.items() if name in takes.names}
            arguments = {**always, **row, **options, "solution_str": content(completion)}
            result = function(**arguments)
            result = await result if inspect.isawaitable(result) else result
            found.append(result["score"] if isinstance(result, dict) else result)
        return found

    return score
