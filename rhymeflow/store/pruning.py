"""Deletes tokens that a run does not need any more, so that its log takes bounded space.

All tokens of an ended group, and all data per token, are deleted in one transaction. Table `pruned`
keeps how many of them each instance generated under which version, for the audit and statistics.
SQLite writes new rows to the pages that become free."""

from __future__ import annotations

import json
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rhymeflow.core.types import GroupId, Version

ROWS_AT_ONCE = 256
"""A commit deletes about this many segments, and twice as many as are new since the last commit. So
it takes little longer than without pruning, and pruning never falls behind."""

_ENDED = """SELECT ending_version, group_id FROM groups WHERE ending IS NOT NULL AND suite IS NULL
    AND group_id IN (SELECT DISTINCT group_id FROM segments) ORDER BY 1, 2"""
_LAST_ROW = "SELECT MAX(rowid), COUNT(*) FROM segments WHERE group_id = ?"
_NEWEST = "SELECT MAX(rowid) FROM segments"
# SQLite numbers the rows of a table upwards; they are read from the end, as far as is needed.
_BEFORE_LAST = """SELECT at FROM (SELECT rowid AS at,
    SUM(LENGTH(tokens) / 4) OVER (ORDER BY rowid DESC ROWS UNBOUNDED PRECEDING) AS total
    FROM segments) WHERE total > ? LIMIT 1"""
_CHOSEN = "group_id IN (SELECT value FROM json_each(?))"
# Segments of one instance and version that follow each other become one row.
_KEEP_SPANS = f"""
WITH parts AS (
    SELECT group_id, member, start, version, instance, steps, drafted,
        LENGTH(tokens) / 4 AS length, LAG(version) OVER response IS NOT version
        OR LAG(instance) OVER response IS NOT instance AS begins
    FROM segments WHERE {_CHOSEN}
    WINDOW response AS (PARTITION BY group_id, member ORDER BY start)),
numbered AS (SELECT *, SUM(begins) OVER (PARTITION BY group_id, member ORDER BY start) AS number
    FROM parts)
INSERT INTO pruned
SELECT group_id, member, MIN(start), SUM(length), version, instance, SUM(steps), SUM(drafted)
FROM numbered GROUP BY group_id, member, number"""
_FORGET = (
    f"DELETE FROM segments WHERE {_CHOSEN}",
    f"DELETE FROM token_details WHERE {_CHOSEN}",
    f"UPDATE trajectories SET text = NULL WHERE {_CHOSEN}",
    "INSERT INTO changes (what, a, b) SELECT 'pruned', value, 0 FROM json_each(?)",
)
_MARK = "INSERT OR REPLACE INTO meta VALUES ('pruned_before', ?)"


class Pruner:
    """Deletes rows of the store behind `connection`. The writer reports each segment that it puts
    and each group that ends, and writes all of them before it calls `prune`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._ended: deque[tuple[Version, GroupId]] | None = None
        """Ended groups with tokens, in the order of ending; None: not read from the store yet."""
        self._marks: deque[tuple[int, int]] = deque()
        """Row numbers of `segments`, each with the number of tokens put up to that row."""
        self._num_tokens = self._new_rows = 0  # put by this writer; since the last `prune`

    def ended(self, group: GroupId, version: Version) -> None:
        """Record that a group ended when `version` was the newest."""
        if self._ended is not None:
            self._ended.append((version, group))

    def put(self, num_tokens: int) -> None:
        """Record a new segment of so many tokens."""
        self._num_tokens += num_tokens
        self._new_rows += 1

    def prune(self, before: Version, history_tokens: int) -> None:
        """Delete tokens of groups that ended under a version less than `before`, except groups with
        tokens among the last `history_tokens`. One call deletes a part; see `ROWS_AT_ONCE`."""
        newest_prunable = self._newest_prunable(history_tokens)
        if self._ended is None:
            self._ended = deque(self._connection.execute(_ENDED))
        room, self._new_rows = ROWS_AT_ONCE + 2 * self._new_rows, 0
        chosen: list[GroupId] = []
        while self._ended and self._ended[0][0] < before and room > 0:
            _, group = self._ended[0]
            last_row, num_rows = self._connection.execute(_LAST_ROW, (group,)).fetchone()
            if num_rows and last_row > newest_prunable:
                break
            self._ended.popleft()
            room -= num_rows
            if num_rows:
                chosen.append(group)
        if chosen:
            groups = (json.dumps(chosen),)
            for statement in (_KEEP_SPANS, *_FORGET):
                self._connection.execute(statement, groups)
            self._connection.execute(_MARK, (before,))

    def _newest_prunable(self, history_tokens: int) -> int:
        """Return the last row before the last `history_tokens` tokens, but not the newest row:
        SQLite would give its number to the next row, and `follow.py` would miss that."""
        (newest,) = self._connection.execute(_NEWEST).fetchone()
        if newest is None:
            return 0
        if not self._marks:
            first = row_before_last(self._rows, history_tokens)
            self._marks.append((first, self._num_tokens - history_tokens))
        self._marks.append((newest, self._num_tokens))
        while len(self._marks) > 1 and self._marks[1][1] <= self._num_tokens - history_tokens:
            self._marks.popleft()
        return int(min(self._marks[0][0], newest - 1))

    def _rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(statement, values).fetchall()


def row_before_last(query: Callable[..., Sequence[Any]], num_tokens: int) -> int:
    """Return the first row of `segments` after which there are at most `num_tokens` tokens, 0 if
    the table has no more. `query` executes a statement with values and returns rows."""
    rows = query(_BEFORE_LAST, num_tokens)
    return int(rows[0][0]) if rows else 0
