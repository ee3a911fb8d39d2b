"""Finds, among lists of tokens, one that begins as another does, and how far."""

from __future__ import annotations

from bisect import bisect
from typing import Generic, TypeVar

import numpy as np

Value = TypeVar("Value")


def common(tokens: np.ndarray, others: np.ndarray) -> int:
    """Return how many first tokens are the same in both."""
    length = min(len(tokens), len(others))
    differ = np.flatnonzero(tokens[:length] != others[:length])
    return int(differ[0]) if len(differ) else length


class Prefixes(Generic[Value]):
    """Lists of tokens, int64, each with a value.

    They are sorted by their bytes, so that the one with the longest common prefix is next to where
    another would be inserted, and only two are compared."""

    def __init__(self) -> None:
        self._sorted: list[bytes] = []
        self._values: list[Value] = []

    def add(self, tokens: np.ndarray, value: Value) -> None:
        """Add a list of tokens."""
        key = tokens.tobytes()
        index = bisect(self._sorted, key)
        self._sorted.insert(index, key)
        self._values.insert(index, value)

    def longest(self, tokens: np.ndarray) -> tuple[Value | None, int]:
        """Return the value of a list that has the longest common prefix with `tokens`, and how many
        tokens that has; None and 0 if there is none."""
        index = bisect(self._sorted, tokens.tobytes())
        value, longest = None, 0
        for neighbour in range(max(index - 1, 0), min(index + 1, len(self._sorted))):
            others = np.frombuffer(self._sorted[neighbour], dtype=tokens.dtype)
            if (length := common(tokens, others)) > longest:
                value, longest = self._values[neighbour], length
        return value, longest
