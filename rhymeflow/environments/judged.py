"""Reward functions of TRL's that are handed the environments themselves.

They are called where the environments live, each with one response's object, so they are part of
its reward. The class that is made has the tools of the one it is made of, and no others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from rhymeflow.data.prompts import RESERVED
from rhymeflow.errors import UserError
from rhymeflow.utils.user_values import Arguments, reward_numbers

ARGUMENT = "environments"
"""A function that names it is called with a list of environment objects."""


def wants_environments(function: Any) -> bool:
    """Whether a reward function names the argument `environments`."""
    try:
        return callable(function) and ARGUMENT in Arguments(function).names
    except ValueError:  # some built-ins do not tell what they take
        return False


def judged_by(
    made: Callable[[], Any], functions: Sequence[tuple[Callable[..., Any], float]]
) -> type[Any]:
    """A class whose reward is that of `made`, a class or a function that makes an object of one,
    plus the weighted sum of the functions'.

    Raises:
        UserError: a function needs what is not known where environments live.
    """
    for function, _ in functions:
        for name in RESERVED.intersection(Arguments(function).needed):
            raise UserError(
                f"Trainer: the reward function {getattr(function, '__name__', function)} takes "
                f"{ARGUMENT} and {name}: where environments live, there are no {name}; let the "
                "environment keep what the function needs"
            )
    base: type[Any] = made if inspect.isclass(made) else type(made())

    class Judged(base):  # type: ignore[misc]
        def __new__(cls) -> Any:
            if inspect.isclass(made):
                return super().__new__(cls)
            made_one = made()
            made_one.__class__ = cls
            return made_one

        def __init__(self) -> None:
            if inspect.isclass(made):
                super().__init__()

        def reset(self, /, seed: Any = None, prompt: Any = None, **columns: Any) -> Any:
            if ARGUMENT in columns:
                raise ValueError(f"the data has a column {ARGUMENT!r}, which is the name of an "
                                 "argument of reward functions; rename the column")  # fmt: skip
            self._columns = columns
            given = Arguments(base.reset).chosen(columns, {"seed": seed, "prompt": prompt})
            return base.reset(self, **given)

        def get_reward(self) -> Any:
            own = getattr(super(), "get_reward", None)
            found = [] if own is None else [(own(), 1.0)]
            columns = {name: [value] for name, value in self._columns.items()}
            for function, weight in functions:
                given = Arguments(function).chosen({**columns, ARGUMENT: [self]})
                found.append((function(**given), weight))
            return _total(found)

    Judged.__name__ = Judged.__qualname__ = base.__name__
    return Judged


async def _total(found: list[tuple[Any, float]]) -> float:
    """The weighted sum of what was returned: numbers, and lists of one."""
    total = 0.0
    for result, weight in found:
        value = await result if inspect.isawaitable(result) else result
        [number] = reward_numbers(value if hasattr(value, "__len__") else [value], 1)
        total += weight * (number or 0.0)
    return total
