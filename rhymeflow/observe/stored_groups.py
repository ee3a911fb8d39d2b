"""Groups of a run from its store alone: those of a step, and one in full.

The answers have the shape of the dashboard's, which finds them by its side index; here tables of
the store are gone through, which is quick enough for one question.

Holds true: `step` counts from 1, as people and metrics do; the store's versions count from 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from rhymeflow.core.types import CUT
from rhymeflow.store import codec
from rhymeflow.store.reader import TrajectoryReader

MAX_EPOCHS = 200
"""Groups of the same prompt that are named, the first ones."""
SHOWN_PROMPT = 200
"""Characters of the prompt of a group that is one among others."""

_GROUP = ("group", "row", "epoch", "prompt", "ending", "ending_version", "ending_reason")
_GROUPS = """SELECT group_id, row, epoch, prompt, ending, ending_version, ending_reason
    FROM groups WHERE {condition} ORDER BY group_id"""
_MEMBER = (
    *("member", "length", "observed", "first_version", "last_version", "steps", "drafted"),
    *("reason", "reward", "step"),
)
_TOLD = ("text", "components")
# Segments have an index by group. `{told}`: more columns of `trajectories`.
_MEMBERS = """
SELECT p.group_id, p.member, SUM(p.length), SUM(p.length * (p.steps = 0)), MIN(p.version),
    MAX(p.version), SUM(p.steps), SUM(p.drafted), t.reason, t.reward, t.trained + 1{told}
FROM (SELECT group_id, member, LENGTH(tokens) / 4 AS length, version, steps, drafted FROM segments
        WHERE group_id IN (SELECT value FROM json_each(?1))
    UNION ALL SELECT group_id, member, length, version, steps, drafted FROM pruned
        WHERE group_id IN (SELECT value FROM json_each(?1))) p
LEFT JOIN trajectories t ON t.group_id = p.group_id AND t.member = p.member
GROUP BY p.group_id, p.member ORDER BY p.group_id, p.member
"""


def of_step(reader: TrajectoryReader, step: int) -> list[dict[str, Any]]:
    """Groups that ended in `step`: its batch, and what was left out while its version was the
    newest; each with its `members`, those with the widest spread of rewards first."""
    with reader.one_state():
        found = _found(reader, "ending_version = ?", step - 1)
    return sorted(found, key=lambda group: (-_spread(group), group["group"]))


def whole(reader: TrajectoryReader, group: int) -> dict[str, Any] | None:
    """One group: its prompt, its responses with texts and rewards by function, and what became of
    the same prompt in all epochs; `None` if there is no such group."""
    rows = reader.query("SELECT row, prompt, columns FROM groups WHERE group_id = ?", group)
    if not rows:
        return None
    ((row, prompt, columns),) = rows
    (found,) = _found(reader, "group_id = ?", group, told=True)
    same = [
        each
        for (each,) in reader.query(
            f"SELECT group_id FROM groups WHERE row = ? ORDER BY group_id LIMIT {MAX_EPOCHS}", row
        )
    ]
    epochs = _found(reader, "group_id IN (SELECT value FROM json_each(?))", json.dumps(same))
    names = ("group", "epoch", "step", "reward", "length")
    return {
        **found,
        "prompt": codec.prompt_of(prompt),
        "columns": json.loads(columns),
        "epochs": [{name: each[name] for name in names} for each in epochs],
    }


def _found(
    reader: TrajectoryReader, condition: str, value: Any, *, told: bool = False
) -> list[dict[str, Any]]:
    """Groups that fit, with their members; `told`: with texts and components."""
    rows = reader.query(_GROUPS.format(condition=condition), value)
    members = _members(reader, [row[0] for row in rows], told=told)
    return [_group(row, members.get(row[0], [])) for row in rows]


def _members(
    reader: TrajectoryReader, groups: Sequence[int], *, told: bool
) -> dict[int, list[dict[str, Any]]]:
    extra = _TOLD if told else ()
    statement = _MEMBERS.format(told="".join(f", t.{name}" for name in extra))
    found: dict[int, list[dict[str, Any]]] = {}
    for group, *row in reader.query(statement, json.dumps(groups)):
        member = dict(zip((*_MEMBER, *extra), row, strict=True))
        if told and member["components"] is not None:
            member["components"] = json.loads(member["components"])
        found.setdefault(group, []).append(member)
    return found


def _group(row: tuple[Any, ...], members: list[dict[str, Any]]) -> dict[str, Any]:
    group = dict(zip(_GROUP, row, strict=True))
    rewards = [each["reward"] for each in members if each["reward"] is not None]
    lengths = [each["length"] for each in members]
    ages = (
        each["step"] - 1 - each["first_version"] for each in members if each["step"] is not None
    )
    is_consumed = group["ending"] == "consumed"
    return group | {
        "prompt": group["prompt"][:SHOWN_PROMPT],
        "step": group["ending_version"] + 1 if is_consumed else None,
        "responses": len(members),
        "rewarded": len(rewards),
        "cut": _count(each["reason"] in CUT for each in members),
        "reward": fmean(rewards) if rewards else None,
        "reward_min": min(rewards, default=None),
        "reward_max": max(rewards, default=None),
        "length": fmean(lengths) if lengths else None,
        "length_max": max(lengths, default=None),
        "staleness_max": max(ages, default=None),
        "members": members,
    }


def _count(found: Iterable[bool]) -> int:
    return sum(1 for each in found if each)


def _spread(group: dict[str, Any]) -> float:
    """Between the greatest and the least reward; without rewards less than any."""
    if group["reward"] is None:
        return -1.0
    return float(group["reward_max"] - group["reward_min"])


__all__ = ["MAX_EPOCHS", "SHOWN_PROMPT", "of_step", "whole"]
