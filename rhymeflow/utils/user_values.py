"""Arguments and rewards of user functions, and one-line descriptions of values and errors."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Collection, Mapping, Set
from pathlib import Path
from typing import Any

from rhymeflow.errors import UserError, counted, nearest

NOTHING: Mapping[str, Any] = {}

LARGEST = 1e15
"""Largest absolute value of a reward. The learner computes in float32, up to 3e38: sums of squares
of larger rewards would become infinite, and the loss not a number."""


class Arguments:
    """The parameters of a function, or of a class."""

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters
        by_name = {
            name: each
            for name, each in parameters.items()
            if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)
        }
        self.names = list(by_name)
        self.needed = [name for name, each in by_name.items() if each.default is each.empty]
        self.takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())

    def missing(self, names: Collection[str]) -> str | None:
        """Return the first required parameter that is not in `names`, or None."""
        return next((name for name in self.needed if name not in names), None)

    def chosen(
        self, values: Mapping[str, Any], if_named: Mapping[str, Any] = NOTHING
    ) -> dict[str, Any]:
        """Return what it takes of `values`, also by `**`, and what it names of `if_named`."""
        taken = {n: each for n, each in values.items() if self.takes_all or n in self.names}
        return taken | {n: each for n, each in if_named.items() if n in self.names}

    def check_options(self, options: Collection[str], where: str, *, only: bool = False) -> None:
        """Check that it takes these options, and with `only` that it requires no others. Raises
        `UserError` if it does not; the message begins with `where`."""
        for option in options:
            if not self.takes_all and option not in self.names:
                raise UserError(f"{where}: takes no option {option!r}{nearest(option, self.names)}")
        if only and (name := self.missing(options)) is not None:
            raise UserError(f"{where}: needs the option {name!r}")


def described(error: BaseException) -> str:
    """Return `ValueError: message (file.py:12)`, with the innermost frame of the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}"


def shown(value: Any) -> str:
    """Return a value's type and the beginning of its `repr`, in one line."""
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def reward_numbers(result: Any, count: int) -> list[float | None]:
    """Return a reward function's result for `count` responses as a list. The result is a sequence,
    or an array [count] or [count, 1] of NumPy, PyTorch or pandas, which is read by position. Raises
    `ValueError` if it is something else; the message says what."""
    wanted = f"a list with {counted(count, 'number')}"
    if hasattr(result, "to_numpy"):  # iterating a data frame would give column names
        result = result.to_numpy()
    is_wrong = isinstance(result, str | bytes | bytearray | memoryview | Mapping | Set)
    if is_wrong or not hasattr(result, "__len__"):
        raise ValueError(f"returned {shown(result)}, should be {wanted}")
    try:
        values = list(result)
    except TypeError:  # a 0-dimensional array has `__len__`, which raises
        raise ValueError(f"returned {shown(result)}, should be {wanted}") from None
    if len(values) != count:
        problem = f"returned {counted(len(values), 'reward')} for {counted(count, 'response')}"
        hint = " (with `per: response` each call gets one response)" if count > 1 else ""
        raise ValueError(problem + hint)
    return [reward_number(value) for value in values]


def reward_number(value: Any) -> float | None:
    """Return a reward as a float, or None if it is None. Raises `ValueError` if it is no reward;
    the message says what it is."""
    try:
        if getattr(value, "shape", None) in ((), (1,)) and hasattr(value, "item"):
            value = value.item()  # NumPy's, PyTorch's
        if value is None:
            return None
        if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
            raise ValueError("should be a number or None")
        number = float(value)
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"returned {shown(value)} as a reward, {error}") from None
    if not math.isfinite(number):
        raise ValueError(
            f"returned {number} as a reward; None is for a sample that it does not apply to"
        )
    if abs(number) > LARGEST:
        raise ValueError(f"returned {number} as a reward, the largest size is {LARGEST:g}")
    return number
