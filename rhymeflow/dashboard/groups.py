"""The view of groups: those of a step, a prompt or the whole run, chosen, sorted, and one in full.

Holds true: every answer is bounded (`PAGE` groups), and says how many there are in all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from rhymeflow.dashboard.run import Run
from rhymeflow.errors import UserError, nearest
from rhymeflow.store import codec
from rhymeflow.store.reader import TrajectoryReader

PAGE = 50

_COLUMNS = (
    "group_id, row, epoch, SUBSTR(prompt, 1, 200), ending, ending_version, ending_reason, step,"
    " responses, rewarded, cut, reward_mean, reward_min, reward_max, length_mean, length_max,"
    " staleness_max"
)

SORTS = {
    "order": "group_id",
    "spread": "reward_max - reward_min",
    "reward": "reward_mean",
    "length": "length_max",
    "staleness": "staleness_max",
}
"""By name, what groups may be sorted by."""

FILTERS = {
    "right": "rewarded = responses AND reward_min = reward_max AND reward_mean >= 1",
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


class Asked(NamedTuple):
    """Which groups are to be listed."""

    step: int | None = None
    row: int | None = None
    filters: tuple[str, ...] = ()
    text: str = ""
    """Their prompts have it, whatever the case."""
    sort: str = "order"
    descending: bool = False
    offset: int = 0


def listed(run: Run, asked: Asked) -> dict[str, Any]:
    """Groups that fit what is asked, `PAGE` of them from `offset` on, and how many fit.

    Raises:
        UserError: there is no such filter or order.
    """
    where, values = ["1"], []
    for name, value in (("step", asked.step), ("row", asked.row)):
        if value is not None:
            where.append(f"{name} = ?")
            values.append(value)
    where += [_known(name, FILTERS, "filter") for name in asked.filters]
    if asked.text:
        where.append("prompt LIKE ? ESCAPE '\\'")
        values.append(f"%{_escaped(asked.text)}%")
    condition = " AND ".join(where)
    order = _known(asked.sort, SORTS, "order")
    direction = "DESC" if asked.descending else "ASC"
    with run.reader() as reader:
        ((count,),) = reader.query(f"SELECT COUNT(*) FROM side.groups WHERE {condition}", *values)
        rows = reader.query(
            f"SELECT {_COLUMNS} FROM side.groups WHERE {condition}"
            f" ORDER BY {order} {direction} NULLS LAST, group_id LIMIT {PAGE} OFFSET ?",
            *values,
            asked.offset,
        )
        ((steps,),) = reader.query("SELECT MAX(step) FROM side.groups")
        members = {row[0]: _members(reader, row[0]) for row in rows}
    return {
        "count": count,
        "steps": steps or 0,
        "groups": [{**_group(row), "members": members[row[0]]} for row in rows],
    }


def whole(run: Run, group: int) -> dict[str, Any]:
    """One group: its prompt, its responses with their texts and rewards, and the same prompt's
    other groups.

    Raises:
        UserError: there is none.
    """
    with run.reader() as reader:
        rows = reader.query(f"SELECT {_COLUMNS} FROM side.groups WHERE group_id = ?", group)
        if not rows:
            raise UserError(f"{run.directory}: has no group {group}")
        found = _group(rows[0])
        ((prompt, columns),) = reader.query(
            "SELECT prompt, columns FROM main.groups WHERE group_id = ?", group
        )
        others = reader.query(
            "SELECT group_id, epoch, step, reward_mean, length_mean FROM side.groups"
            " WHERE row = ? ORDER BY group_id LIMIT 200",
            found["row"],
        )
        texts = dict(
            (member, (text, components))
            for member, text, components in reader.query(
                "SELECT member, text, components FROM trajectories WHERE group_id = ?", group
            )
        )
        members = _members(reader, group)
    for each in members:
        text, components = texts.get(each["member"], (None, None))
        each |= {"text": text, "components": components and msgspec.json.decode(components)}
    keys = ("group", "epoch", "step", "reward", "length")
    return {
        **found,
        "prompt": codec.prompt_of(prompt),
        "columns": msgspec.json.decode(columns),
        "members": members,
        "epochs": [dict(zip(keys, each, strict=True)) for each in others],
    }


def _members(reader: TrajectoryReader, group: int) -> list[dict[str, Any]]:
    keys = ("member", "length", "observed", "first_version", "last_version", "steps", "drafted")
    keys += ("reason", "reward", "step")
    rows = reader.query(
        f"SELECT {', '.join(keys)} FROM side.responses WHERE group_id = ? ORDER BY member", group
    )
    return [dict(zip(keys, row, strict=True)) for row in rows]


def _group(row: tuple[Any, ...]) -> dict[str, Any]:
    keys = (
        *("group", "row", "epoch", "prompt", "ending", "ending_version", "ending_reason", "step"),
        *("responses", "rewarded", "cut", "reward", "reward_min", "reward_max", "length"),
        *("length_max", "staleness_max"),
    )
    return dict(zip(keys, row, strict=True))


def _known(name: str, known: dict[str, str], what: str) -> str:
    if name not in known:
        raise UserError(f"there is no {what} {name!r}{nearest(name, known)}")
    return f"({known[name]})"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


__all__ = ["FILTERS", "PAGE", "SORTS", "Asked", "listed", "whole"]
