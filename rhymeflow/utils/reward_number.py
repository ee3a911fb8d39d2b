"""What user code may give as a reward: a finite number of bounded size, or None.

Knows nothing of who gives it.
"""

from __future__ import annotations

import math
from typing import Any

LARGEST = 1e15
"""Size of a reward at most. The learner computes in float32, which ends at 3e38: sums of squares of
such rewards stay finite, of larger ones they become infinite, and the loss nothing."""


def reward_number(value: Any) -> float | None:
    """Return the reward as a float, or None where there is none.

    Raises:
        ValueError: it is no reward; the text says what it is instead.
    """
    if value is None:
        return None
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise ValueError(f"returned {shown(value)} as a reward, should be a number or None")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"returned {shown(value)} as a reward: {error}") from None
    if not math.isfinite(number):
        raise ValueError(
            f"returned {number} as a reward; None is for a sample it does not apply to"
        )
    if abs(number) > LARGEST:
        raise ValueError(f"returned {number} as a reward, the largest size is {LARGEST:g}")
    return number


def shown(value: Any) -> str:
    """Return a value's type and the beginning of its `repr`, in one line."""
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
