"""What user code takes by name and may give as a reward, and what it raised or gave, in a line."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Collection, Mapping, Set
from pathlib import Path
from typing import Any

from rhymeflow.errors import UserError, nearest

NOTHING: Mapping[str, Any] = {}

LARGEST = 1e15
"""Size of a reward at most. The learner computes in float32, which ends at 3e38: sums of squares of
such rewards stay finite, of larger ones they become infinite, and the loss nothing."""


class Arguments:
    """The arguments of a function, or of a class."""

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

    def missing(self, given: Collection[str]) -> str | None:
        """An argument that it needs and is not given, if there is one."""
        return next((name for name in self.needed if name not in given), None)

    def chosen(
        self, given: Mapping[str, Any], if_named: Mapping[str, Any] = NOTHING
    ) -> dict[str, Any]:
        """Those of `given` that it takes, and those of `if_named` that it names."""
        taken = {n: each for n, each in given.items() if self.takes_all or n in self.names}
        return taken | {n: each for n, each in if_named.items() if n in self.names}

    def check_options(self, options: Collection[str], where: str, *, only: bool = False) -> None:
        """Look whether it takes these options, and, if it is given them `only`, needs no other.

        Raises:
            UserError: it does not; begins with `where`.
        """
        for option in options:
            if not self.takes_all and option not in self.names:
                raise UserError(f"{where}: takes no option {option!r}{nearest(option, self.names)}")
        if only and (name := self.missing(options)) is not None:
            raise UserError(f"{where}: needs the option {name!r}")


def described(error: BaseException) -> str:
    """`ValueError: message (file.py:12)`, the place being the innermost one."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}"


def shown(value: Any) -> str:
    """Return a value's type and the beginning of its `repr`, in one line."""
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def reward_numbers(result: Any, count: int) -> list[float | None]:
    """Return what a function gave for so many responses: something with an order, also a vector
    [count] or [count, 1] of NumPy, PyTorch or pandas, by position.

    Raises:
        ValueError: it is something else; the text says what.
    """
    wanted = f"a list with {count} number{'' if count == 1 else 's'}"
    if hasattr(result, "to_numpy"):  # iterated, a data frame gives the names of its columns
        result = result.to_numpy()
    is_none = isinstance(result, str | bytes | bytearray | memoryview | Mapping | Set)
    if is_none or not hasattr(result, "__len__"):
        raise ValueError(f"returned {shown(result)}, should be {wanted}")
    try:
        values = list(result)
    except TypeError:  # a 0-dimensional array has a length that it refuses to tell
        raise ValueError(f"returned {shown(result)}, should be {wanted}") from None
    if len(values) != count:
        what = f"returned {len(values)} reward{'' if len(values) == 1 else 's'} for {count} "
        what += f"response{'' if count == 1 else 's'}"
        raise ValueError(what + (" (`per: response` hands them over singly)" if count > 1 else ""))
    return [reward_number(value) for value in values]


def reward_number(value: Any) -> float | None:
    """Return the reward as a float, or None where there is none.

    Raises:
        ValueError: it is no reward; the text says what it is instead.
    """
    try:
        if getattr(value, "shape", None) in ((), (1,)) and hasattr(value, "item"):
            value = value.item()  # NumPy's, PyTorch's
        if value is None:
            return None
        if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
            raise ValueError("should be a number or None")
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"returned {shown(value)} as a reward, {error}") from None
    if not math.isfinite(number):
        raise ValueError(
            f"returned {number} as a reward; None is for a sample it does not apply to"
        )
    if abs(number) > LARGEST:
        raise ValueError(f"returned {number} as a reward, the largest size is {LARGEST:g}")
    return number
