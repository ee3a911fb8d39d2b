"""The view of groups: those of a step, a prompt or the whole run, filtered, sorted, in pages.

Queries read a table in memory with a row of sums per group. Only groups that are in the store's
`changes` or in new segments are summed again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from rhymeflow.dashboard.run import Run
from rhymeflow.errors import UserError, nearest
from rhymeflow.observe import query
from rhymeflow.observe.query import CHOSEN, GROUPS
from rhymeflow.store.reader import TrajectoryReader

T = TypeVar("T")

PAGE = 50
_SEARCHED = 2_000  # first characters of a prompt that are searched for a text
GROUPS_AT_ONCE = 2_000
"""Groups that one read transaction sums; a long one delays the writer's checkpoints."""

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
ORDERS = {
    "order": "group_id",
    "spread": "reward_max - reward_min",
    "reward": "reward",
    "length": "length_max",
    "staleness": "staleness_max",
}
OF_COMPONENT = {
    "mixed": "most > least",
    "right": "least = most AND least >= 1",
    "wrong": "most <= 0",
}

_TABLES = (
    "PRAGMA temp_store = MEMORY",
    f"CREATE TEMP TABLE summaries AS {GROUPS.format(those='IS NULL')}",  # columns, and no row
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
    """A reader with tables `temp.summaries` and `temp.components` of all training groups."""

    def __init__(self, reader: TrajectoryReader) -> None:
        self.reader = reader
        self._marks: tuple[int, int] | None = None
        """Numbers of the last rows of `segments` and `changes` that were read."""
        for statement in _TABLES:
            reader.query(statement)

    def follow(self) -> None:
        """Sum again the groups that have changed."""
        (marks,) = self.reader.query(_MARKS)
        if marks == self._marks:
            return
        if self._marks is None:
            rows = self.reader.query("SELECT group_id FROM groups ORDER BY 1")
        else:
            rows = self.reader.query(_TOUCHED, *self._marks)
        touched = [
            group for (group,) in rows if group >= 0
        ]  # answers of suites have negative group numbers
        for start in range(0, len(touched), GROUPS_AT_ONCE):
            self._put(json.dumps(touched[start : start + GROUPS_AT_ONCE]))
        self._marks = marks[0], marks[1]

    def _put(self, groups: str) -> None:
        with self.reader.one_state():
            for table in ("summaries", "components"):
                self.reader.query(f"DELETE FROM temp.{table} WHERE group_id {CHOSEN}", groups)
            self.reader.query(f"INSERT INTO temp.summaries {GROUPS.format(those=CHOSEN)}", groups)
            self.reader.query(_COMPONENTS, groups)


class GroupQuery(NamedTuple):
    """Selects and orders groups."""

    step: int | None = None
    row: int | None = None  # of the data: the prompt's
    filters: tuple[str, ...] = ()
    text: str = ""  # part of the prompt; ASCII letters match in either case
    component: str = ""  # a reward function; `of_component` filters by its rewards
    of_component: str = "mixed"
    sort: str = "order"
    descending: bool = False
    offset: int = 0


def listed(run: Run, asked: GroupQuery) -> dict[str, Any]:
    """Return `PAGE` matching groups from `offset` on, and the total count. Ties are broken by group
    number, in the same direction; groups without a value come last. Raises `UserError` if there is
    no such filter, order or reward function."""
    column = _known(asked.sort, ORDERS, "order")
    direction = "DESC" if asked.descending else "ASC"
    with run.kept(Summaries) as kept, kept.reader.one_state():
        reader = kept.reader
        names = reader.query("SELECT DISTINCT name FROM temp.components ORDER BY 1")
        components = [name for (name,) in names]
        where, values = _conditions(asked, components)
        rows = reader.query(
            f"SELECT group_id FROM temp.summaries WHERE {where}"
            f" ORDER BY {column} {direction} NULLS LAST, group_id {direction}",
            *values,
        )
        chosen = [group for (group,) in rows]
        page = chosen[asked.offset : asked.offset + PAGE]
        found = {each["group"]: each for each in query.groups(reader, page)}
        ((steps,),) = reader.query("SELECT MAX(step) FROM temp.summaries")
    return {
        "count": len(chosen),
        "steps": steps or 0,
        "components": components,
        "groups": [found[group] for group in page],
    }


def _conditions(asked: GroupQuery, components: list[str]) -> tuple[str, list[Any]]:
    """Return the SQL condition on `temp.summaries`, and its values."""
    where = [_known(name, FILTERS, "filter") for name in asked.filters]
    values: list[Any] = []
    for name, value in (("row", asked.row), ("step", asked.step)):
        if value is not None:
            where.append(f"{name} = ?")
            values.append(value)
    if asked.text:
        where.append(
            "group_id IN (SELECT group_id FROM main.groups"
            f" WHERE SUBSTR(prompt, 1, {_SEARCHED}) LIKE ? ESCAPE '\\')"
        )
        text = asked.text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        values.append(f"%{text}%")
    if asked.component:
        _known(asked.component, dict.fromkeys(components), "reward function")
        condition = _known(asked.of_component, OF_COMPONENT, "filter of a reward function")
        where.append(
            f"group_id IN (SELECT group_id FROM temp.components WHERE name = ? AND {condition})"
        )
        values.append(asked.component)
    return " AND ".join(f"({each})" for each in where) or "1", values


def _known(name: str, known: Mapping[str, T], kind: str) -> T:
    if name not in known:
        raise UserError(f"there is no {kind} {name!r}{nearest(name, known)}")
    return known[name]
