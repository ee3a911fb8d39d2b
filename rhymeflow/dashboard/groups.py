"""The view of groups: those of a step, a prompt or the whole run, chosen, sorted, and one in full.

Every answer is bounded (`PAGE` groups), and says how many there are in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from rhymeflow.dashboard.run import Run
from rhymeflow.dashboard.summaries import FILTERS, OF_COMPONENT, ORDERS
from rhymeflow.errors import UserError, nearest
from rhymeflow.observe import query

PAGE = 50
_SEARCHED = 2_000
"""Characters of a prompt."""

Known = TypeVar("Known")


class Asked(NamedTuple):
    """Which groups are to be listed."""

    step: int | None = None
    row: int | None = None
    filters: tuple[str, ...] = ()
    text: str = ""
    """Their prompts have it, whatever the case."""
    component: str = ""
    """A reward function, by whose values alone groups are chosen."""
    of_component: str = "mixed"
    """What these are to be."""
    sort: str = "order"
    descending: bool = False
    offset: int = 0


def listed(run: Run, asked: Asked) -> dict[str, Any]:
    """Groups that fit what is asked, `PAGE` of them from `offset` on, and how many fit. Of equal
    ones those come first that were requested first, or last where the order is descending; those
    that have no such figure come at the end.

    Raises:
        UserError: there is no such filter, order or reward function.
    """
    column = _known(asked.sort, ORDERS, "order")
    direction = "DESC" if asked.descending else "ASC"
    with run.summaries() as summaries, summaries.reader.one_state():
        names = summaries.query("SELECT DISTINCT name FROM temp.components ORDER BY 1")
        components = [name for (name,) in names]
        where, values = _conditions(asked, components)
        rows = summaries.query(
            f"SELECT group_id FROM temp.summaries WHERE {where}"
            f" ORDER BY {column} {direction} NULLS LAST, group_id {direction}",
            *values,
        )
        chosen = [group for (group,) in rows]
        page = chosen[asked.offset : asked.offset + PAGE]
        found = {each["group"]: each for each in query.groups(summaries.reader, page)}
        ((steps,),) = summaries.query("SELECT MAX(step) FROM temp.summaries")
    return {
        "count": len(chosen),
        "steps": steps or 0,
        "components": components,
        "groups": [found[group] for group in page],
    }


def _conditions(asked: Asked, components: list[str]) -> tuple[str, list[Any]]:
    """What is asked as a condition on `temp.summaries`, and its values."""
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
        values.append(like(asked.text))
    if asked.component:
        _known(asked.component, dict.fromkeys(components), "reward function")
        condition = _known(asked.of_component, OF_COMPONENT, "filter of a reward function")
        where.append(
            f"group_id IN (SELECT group_id FROM temp.components WHERE name = ? AND {condition})"
        )
        values.append(asked.component)
    return " AND ".join(f"({each})" for each in where) or "1", values


def like(text: str) -> str:
    """The pattern of what has the text, with the escape character '\\'."""
    return "%" + text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"


def whole(run: Run, group: int) -> dict[str, Any]:
    """One group; see `query.group`.

    Raises:
        UserError: there is none.
    """
    with run.reader() as reader:
        return query.group(reader, group)


def _known(name: str, known: Mapping[str, Known], what: str) -> Known:
    if name not in known:
        raise UserError(f"there is no {what} {name!r}{nearest(name, known)}")
    return known[name]


__all__ = ["PAGE", "Asked", "listed", "whole"]
