"""Where the newest tokens of a store begin. Knows nothing of what they are wanted for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

# SQLite numbers the rows of a table upwards; they are read from the end, as far as is needed.
_BEFORE_LAST = """SELECT at FROM (SELECT rowid AS at,
    SUM(LENGTH(tokens) / 4) OVER (ORDER BY rowid DESC ROWS UNBOUNDED PRECEDING) AS total
    FROM segments) WHERE total > ? LIMIT 1"""


def row_before_last(query: Callable[..., Sequence[Any]], num_tokens: int) -> int:
    """The row of `segments` after which there are at most `num_tokens` tokens; 0: all are.

    `query` gives the rows of a statement with its values.
    """
    rows = query(_BEFORE_LAST, num_tokens)
    return int(rows[0][0]) if rows else 0


__all__ = ["row_before_last"]
