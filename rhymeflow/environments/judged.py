"""TRL's reward functions that take environment objects.

They are called in the process of the environment, each with the object of one response, and their
rewards are added to the environment's. `judged_by` makes a class that does so, with the same tools.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from rhymeflow.data.prompts import RESERVED
from rhymeflow.errors import UserError
from rhymeflow.utils.user_values import Arguments, reward_numbers

ARGUMENT = "environments"  # a function with this argument gets a list of environment objects


def wants_environments(function: Any) -> bool:
    """Whether a reward function has the argument `environments`."""
    try:
        return callable(function) and ARGUMENT in Arguments(function).names
    except ValueError:  # some built-ins have no signature
        return False


def judged_by(
    factory: Callable[[], Any], functions: Sequence[tuple[Callable[..., Any], float]]
) -> type[Any]:
    """Return a class whose reward is that of the class `factory`, or of the class of the object
    that it returns, plus the weighted sum of the functions' rewards. Raises `UserError` if a
    function needs an argument that this process does not have."""
    for function, _ in functions:
        for name in RESERVED.intersection(Arguments(function).needed):
            raise UserError(
                f"Trainer: the reward function {getattr(function, '__name__', function)} takes "
                f"{ARGUMENT} and {name}: it is called with the environment, which has no {name}; "
                "store there what it needs"
            )
    base: type[Any] = factory if inspect.isclass(factory) else type(factory())

    class Judged(base):  # type: ignore[misc]
        def __new__(cls) -> Any:
            if inspect.isclass(factory):
                return super().__new__(cls)
            environment = factory()
            environment.__class__ = cls
            return environment

        def __init__(self) -> None:
            if inspect.isclass(factory):
                super().__init__()

        def reset(self, /, seed: Any = None, prompt: Any = None, **columns: Any) -> Any:
            if ARGUMENT in columns:
                raise ValueError(f"the data has a column {ARGUMENT!r}, which is the name of an "
                                 "argument of reward functions; rename the column")  # fmt: skip
            self._columns = columns
            arguments = Arguments(base.reset).chosen(columns, {"seed": seed, "prompt": prompt})
            return base.reset(self, **arguments)

        def get_reward(self) -> Any:
            inherited = getattr(super(), "get_reward", None)
            rewards = [] if inherited is None else [(inherited(), 1.0)]
            columns = {name: [value] for name, value in self._columns.items()}
            for function, weight in functions:
                arguments = Arguments(function).chosen({**columns, ARGUMENT: [self]})
                rewards.append((function(**arguments), weight))
            return _total(rewards)

    Judged.__name__ = Judged.__qualname__ = base.__name__
    return Judged


async def _total(rewards: list[tuple[Any, float]]) -> float:
    """Return the weighted sum of results, which are numbers, lists of one number, or awaitables."""
    total = 0.0
    for result, weight in rewards:
        value = await result if inspect.isawaitable(result) else result
        [number] = reward_numbers(value if hasattr(value, "__len__") else [value], 1)
        total += weight * (number or 0.0)
    return total
