"""The view of groups: those of a step, a prompt or the whole run, chosen, sorted, and one in full.

Holds true: every answer is bounded (`PAGE` groups), and says how many there are in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from rhymeflow.dashboard import side_groups
from rhymeflow.dashboard.run import Run
from rhymeflow.dashboard.side_groups import FLAGS, OF_COMPONENT, ORDERS
from rhymeflow.errors import UserError, nearest
from rhymeflow.store import codec
from rhymeflow.store.reader import TrajectoryReader

PAGE = 50

Known = TypeVar("Known")

_COLUMNS = (
    "g.group_id, g.row, epoch, SUBSTR(p.text, 1, 200), ending, ending_version, ending_reason, step,"
    " responses, rewarded, cut, reward_mean, reward_min, reward_max, length_mean, length_max,"
    " staleness_max"
)
_GROUPS = f"""SELECT {_COLUMNS} FROM side.groups g JOIN side.prompts p ON p.id = g.prompt
    WHERE g.group_id IN (SELECT value FROM json_each(?))"""

FEW_PROMPTS = 1_000
"""Up to so many prompts that have a text, their groups are looked up one prompt after the other;
of more, all groups are gone through in order, so that they need not be sorted."""


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
    bits = sum({_known(name, FLAGS, "filter") for name in asked.filters})
    column = _known(asked.sort, ORDERS, "order")
    with run.reader() as reader, reader.one_state():
        names = side_groups.component_names(reader)
        if asked.component:
            _known(asked.component, dict.fromkeys(names), "reward function")
        if asked.text or asked.component or asked.step is not None or asked.row is not None:
            chosen = _chosen(reader, asked, bits, column)
            count, ids = len(chosen), chosen[asked.offset : asked.offset + PAGE]
        else:
            counts = side_groups.tallies(reader)
            count = sum(groups for flags, groups in counts.items() if flags & bits == bits)
            ids = _page(reader, asked, bits, column)
        rows = {row[0]: row for row in reader.query(_GROUPS, _json(ids))}
        ((steps,),) = reader.query("SELECT MAX(step) FROM side.groups")
        members = _members(reader, ids)
    return {
        "count": count,
        "steps": steps or 0,
        "components": names,
        "groups": [{**_group(rows[id_]), "members": members[id_]} for id_ in ids],
    }


def _page(reader: TrajectoryReader, asked: Asked, bits: int, column: str) -> list[int]:
    """Of all groups with these bits: along an index that has nothing else."""
    rows = reader.query(
        f"SELECT group_id FROM side.groups INDEXED BY groups_by_{asked.sort}"
        f" WHERE flags & ? = ? {_order(asked, column)} LIMIT {PAGE} OFFSET ?",
        *(bits, bits, asked.offset),
    )
    return [group for (group,) in rows]


def _chosen(reader: TrajectoryReader, asked: Asked, bits: int, column: str) -> list[int]:
    """All groups of a step, a prompt, a text or a reward function's values, in order."""
    where: list[str] = ["flags & ? = ?"]
    values: list[int | str] = [bits, bits]
    index = ""
    for name, value in (("row", asked.row), ("step", asked.step)):
        if value is not None:
            where.append(f"{name} = ?")
            values.append(value)
            index = f"groups_by_{name}"
    if asked.text:
        count = side_groups.match_prompts(reader, asked.text)
        where.append("prompt IN temp.matched")
        index = index or f"groups_by_{'prompt' if count <= FEW_PROMPTS else asked.sort}"
    if asked.component:
        condition = _known(asked.of_component, OF_COMPONENT, "filter of a reward function")
        where.append(
            f"group_id IN (SELECT group_id FROM side.components WHERE name = ? AND {condition})"
        )
        values.append(asked.component)
    index = index or f"groups_by_{asked.sort}"
    rows = reader.query(
        f"SELECT group_id FROM side.groups INDEXED BY {index} WHERE {' AND '.join(where)}"
        f" {_order(asked, column)}",
        *values,
    )
    return [group for (group,) in rows]


def _order(asked: Asked, column: str) -> str:
    direction = "DESC" if asked.descending else "ASC"
    return f"ORDER BY {column} {direction} NULLS LAST, group_id {direction}"


def whole(run: Run, group: int) -> dict[str, Any]:
    """One group: its prompt, its responses with their texts and rewards, and the same prompt's
    other groups.

    Raises:
        UserError: there is none.
    """
    with run.reader() as reader:
        rows = reader.query(_GROUPS, _json([group]))
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
        members = _members(reader, [group])[group]
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


def _members(reader: TrajectoryReader, groups: list[int]) -> dict[int, list[dict[str, Any]]]:
    keys: tuple[str, ...] = (
        "member",
        "length",
        "observed",
        "first_version",
        "last_version",
        "steps",
        "drafted",
    )
    keys += ("reason", "reward", "step")
    rows = reader.query(
        f"SELECT group_id, {', '.join(keys)} FROM side.responses"
        " WHERE group_id IN (SELECT value FROM json_each(?)) ORDER BY group_id, member",
        _json(groups),
    )
    found: dict[int, list[dict[str, Any]]] = {group: [] for group in groups}
    for group, *values in rows:
        found[group].append(dict(zip(keys, values, strict=True)))
    return found


def _group(row: tuple[Any, ...]) -> dict[str, Any]:
    keys = (
        *("group", "row", "epoch", "prompt", "ending", "ending_version", "ending_reason", "step"),
        *("responses", "rewarded", "cut", "reward", "reward_min", "reward_max", "length"),
        *("length_max", "staleness_max"),
    )
    return dict(zip(keys, row, strict=True))


def _known(name: str, known: Mapping[str, Known], what: str) -> Known:
    if name not in known:
        raise UserError(f"there is no {what} {name!r}{nearest(name, known)}")
    return known[name]


def _json(groups: list[int]) -> str:
    return msgspec.json.encode(groups).decode()


__all__ = ["PAGE", "Asked", "listed", "whole"]
