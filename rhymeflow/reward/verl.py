"""Reward functions written for verl: `compute_score(data_source, solution_str, ground_truth, ...)`.

Known by its parameters, whatever its name: one response a call, the text without special tokens. A
dictionary that it returns has the reward as `score`; what else is in it is for verl's log.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rhymeflow.reward.builtin import content

ABSENT = ("data_source", "extra_info")
"""What verl always gives a function, and other data may lack: it is None then."""


def is_verl(function: Callable[..., Any]) -> bool:
    """Whether the function takes what verl gives, and not what TRL does."""
    names = inspect.signature(function).parameters
    return "solution_str" in names and "ground_truth" in names and "completions" not in names


def adapted(function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function with TRL's signature and these options bound."""
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    always = {name: None for name in ABSENT if takes_all or name in parameters}

    async def score(completions: list[Any], **columns: Any) -> list[Any]:
        found = []
        for number, completion in enumerate(completions):
            row = {name: values[number] for name, values in columns.items() if name in parameters}
            arguments = {**always, **row, **options, "solution_str": content(completion)}
            result = function(**arguments)
            result = await result if inspect.isawaitable(result) else result
            found.append(result["score"] if isinstance(result, dict) else result)
        return found

    score.__signature__ = _signature(parameters, options)  # type: ignore[attr-defined]
    return score


def _signature(
    parameters: Mapping[str, inspect.Parameter], options: Mapping[str, Any]
) -> inspect.Signature:
    """TRL's, with the columns that the function must be given."""
    known = {"solution_str", *ABSENT, *options}
    named = [
        each.replace(kind=each.KEYWORD_ONLY)
        for name, each in parameters.items()
        if name not in known and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    first = inspect.Parameter("completions", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return inspect.Signature(
        [first, *named, inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]
    )
