"""What a reward function says besides its rewards: TRL's `log_metric` and `log_extra`.

Holds true: what is taken can be sent; a number that is none and a name that is no text are errors
in the function that gives them. Knows nothing of where it goes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


class Logged:
    """What was said in one call of a function."""

    def __init__(self) -> None:
        self.metrics: list[tuple[str, float]] = []
        self.extra: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Add a number to the metric `name`, whose mean over a step is logged."""
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}, {value!r}): not a finite number")
        self.metrics.append((str(name), number))

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Keep a value for each response, as text where it is neither number nor text."""
        self.extra.setdefault(str(column), []).extend(map(_sendable, values))


def _sendable(value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:  # NumPy's, torch's
        value = value.item()
    is_plain = value is None or type(value) in (str, bool, float)
    if is_plain or (type(value) is int and -(2**63) <= value < 2**64):
        return value
    return str(value)
