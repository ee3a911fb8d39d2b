"""What is asked of all groups of a run: a row for each in a temporary table, in memory.

Groups that have ended hardly change, so only those are summed up again that the store's `changes`
and new segments name. Then no question reads all responses.
"""

from __future__ import annotations

import json
from typing import Any

from rhymeflow.observe.query import CHOSEN, GROUPS
from rhymeflow.store.reader import TrajectoryReader

GROUPS_AT_ONCE = 2_000
"""Summed up within one read transaction, which holds up the writer's checkpoints."""

FILTERS = {
    "right": "rewarded = responses AND reward_min = reward_max AND reward >= 1",
    "wrong": "rewarded = responses AND reward_max <= 0",
    "mixed": "reward_max > reward_min",
    "cut": "cut > 0",
    "errors": "ending_reason IS NOT NULL",
    "open": "ending IS NULL",
    "consumed": "ending = 'consumed'",
    "filtered": "ending = 'filtered'",
    "aborted": "ending = 'aborted'",
}
"""By name, which groups may be asked for."""
ORDERS = {
    "order": "group_id",
    "spread": "reward_max - reward_min",
    "reward": "reward",
    "length": "length_max",
    "staleness": "staleness_max",
}
"""By name, what groups may be sorted by."""
OF_COMPONENT = {
    "mixed": "most > least",
    "right": "least = most AND least >= 1",
    "wrong": "most <= 0",
}
"""By name, which groups may be asked for by one reward function's values."""

_TABLES = (
    "PRAGMA temp_store = MEMORY",
    f"CREATE TEMP TABLE summaries AS {GROUPS.format(those='IS NULL')}",
    "CREATE UNIQUE INDEX temp.summaries_by_group ON summaries (group_id)",
    "CREATE TEMP TABLE components (name, group_id, least, most)",
    "CREATE INDEX temp.components_by_group ON components (group_id)",
)
_MARKS = """SELECT (SELECT COALESCE(MAX(rowid), 0) FROM segments),
    (SELECT COALESCE(MAX(seq), 0) FROM changes)"""
_TOUCHED = """SELECT group_id FROM segments WHERE rowid > ?
    UNION SELECT a FROM changes WHERE seq > ? AND what IN ('groups', 'trajectories', 'pruned')
    ORDER BY 1"""
_COMPONENTS = f"""INSERT INTO temp.components
    SELECT j.key, t.group_id, MIN(j.value), MAX(j.value)
    FROM trajectories t, json_each(t.components) j
    WHERE t.group_id IN (SELECT group_id FROM temp.summaries WHERE group_id {CHOSEN} AND has_parts)
    GROUP BY 1, 2"""


class Summaries:
    """Keeps `temp.summaries` and `temp.components` of a reader up to date."""

    def __init__(self, reader: TrajectoryReader) -> None:
        self.reader = reader
        self._marks: tuple[int, int] | None = None
        """Up to which row of `segments` and of `changes` it was looked."""
        for statement in _TABLES:
            reader.query(statement)

    def refresh(self) -> None:
        """Sum up again what has changed."""
        (marks,) = self.reader.query(_MARKS)
        if marks == self._marks:
            return
        if self._marks is None:
            rows = self.reader.query("SELECT group_id FROM groups ORDER BY 1")
        else:
            rows = self.reader.query(_TOUCHED, *self._marks)
        touched = [group for (group,) in rows if group >= 0]  # those below are of suites
        for start in range(0, len(touched), GROUPS_AT_ONCE):
            self._put(json.dumps(touched[start : start + GROUPS_AT_ONCE]))
        self._marks = marks[0], marks[1]

    def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Rows of one SQL statement."""
        return self.reader.query(statement, *values)

    def _put(self, groups: str) -> None:
        with self.reader.one_state():
            for table in ("summaries", "components"):
                self.reader.query(f"DELETE FROM temp.{table} WHERE group_id {CHOSEN}", groups)
            self.reader.query(f"INSERT INTO temp.summaries {GROUPS.format(those=CHOSEN)}", groups)
            self.reader.query(_COMPONENTS, groups)


__all__ = ["FILTERS", "OF_COMPONENT", "ORDERS", "Summaries"]
