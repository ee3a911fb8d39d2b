"""What user code may give as a reward: a finite number of bounded size, or None."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

from rhymeflow.utils.described import shown

LARGEST = 1e15
"""Size of a reward at most. The learner computes in float32, which ends at 3e38: sums of squares of
such rewards stay finite, of larger ones they become infinite, and the loss nothing."""


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
