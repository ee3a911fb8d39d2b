"""Questions to a run's store, answered by plain records: dicts of JSON's values.

The terminal, the pages and JSON draw what is returned here, so they say the same. `step` counts
from 1, as people and metrics do; the store's versions count from 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rhymeflow.core.types import CUT
from rhymeflow.errors import UserError
from rhymeflow.store import codec
from rhymeflow.store.reader import TrajectoryReader

Record = dict[str, Any]

MAX_EPOCHS = 200
"""Groups of the same prompt that are named, the first ones."""
SHOWN_PROMPT = 200
"""Characters of the prompt of a group that is one among others."""

CHOSEN = "IN (SELECT value FROM json_each(?1))"
"""What `{those}` of a statement may be: groups of a list in JSON."""

_MEMBER = (
    *("member", "length", "observed", "first_version", "last_version", "steps", "drafted"),
    *("reason", "reward", "step"),
)
# A group's tokens are deleted whole: a response is in one of the two tables. Of one reward function
# alone the reward says all; rewards of several (`has_parts`) have a comma between them.
MEMBERS = """
SELECT s.group_id, s.member, s.length, s.observed, s.first_version, s.last_version, s.steps,
    s.drafted, t.reason, t.reward, t.trained + 1 AS step,
    INSTR(t.components, ',') > 0 AS has_parts
FROM (SELECT group_id, member, SUM(LENGTH(tokens) / 4) AS length,
        SUM(LENGTH(tokens) / 4 * (steps = 0)) AS observed, MIN(version) AS first_version,
        MAX(version) AS last_version, SUM(steps) AS steps, SUM(drafted) AS drafted
        FROM segments WHERE group_id {those} GROUP BY group_id, member
    UNION ALL SELECT group_id, member, SUM(length), SUM(length * (steps = 0)), MIN(version),
        MAX(version), SUM(steps), SUM(drafted)
        FROM pruned WHERE group_id {those} GROUP BY group_id, member) s
LEFT JOIN trajectories t ON t.group_id = s.group_id AND t.member = s.member"""

_TOLD = "SELECT group_id, member, text, components FROM trajectories WHERE group_id {those}"

_ENDED_IN = "SELECT group_id FROM groups WHERE ending_version = ? AND suite IS NULL"
_SAME_PROMPT = f"""SELECT group_id FROM groups
    WHERE row = ? AND suite IS (SELECT suite FROM groups WHERE group_id = ?)
    ORDER BY group_id LIMIT {MAX_EPOCHS}"""

_CUT = ", ".join(f"'{reason}'" for reason in CUT)
_GROUP = (
    *("group", "row", "epoch", "prompt", "ending", "ending_version", "ending_reason", "step"),
    *("responses", "rewarded", "cut", "reward", "reward_min", "reward_max", "length"),
    *("length_max", "staleness_max"),
)
# The last columns are not of `_GROUP`: tokens that were sampled, in how many iterations, how many
# were drafted, and whether there are rewards by function.
GROUPS = f"""
SELECT g.group_id, g.row, g.epoch, SUBSTR(g.prompt, 1, {SHOWN_PROMPT}) AS prompt, g.ending,
    g.ending_version, g.ending_reason,
    CASE WHEN g.ending = 'consumed' THEN g.ending_version + 1 END AS step,
    COUNT(m.member) AS responses, COUNT(m.reward) AS rewarded,
    COUNT(*) FILTER (WHERE m.reason IN ({_CUT})) AS cut, AVG(m.reward) AS reward,
    MIN(m.reward) AS reward_min, MAX(m.reward) AS reward_max, AVG(m.length) AS length,
    MAX(m.length) AS length_max, MAX(m.step - 1 - m.first_version) AS staleness_max,
    SUM(m.length - m.observed) AS sampled, SUM(m.steps) AS steps, SUM(m.drafted) AS drafted,
    MAX(m.has_parts) AS has_parts
FROM groups g LEFT JOIN ({MEMBERS}) m ON m.group_id = g.group_id
WHERE g.group_id {{those}} GROUP BY g.group_id"""


def groups(reader: TrajectoryReader, chosen: Sequence[int], *, told: bool = False) -> list[Record]:
    """These groups in ascending order, each with its `members`; `told`: with their texts, and
    rewards by function."""
    ids = json.dumps(chosen)
    members: dict[int, list[Record]] = {}
    statement = f"SELECT group_id, {', '.join(_MEMBER)} FROM ({MEMBERS.format(those=CHOSEN)})"
    for group, *row in reader.query(f"{statement} ORDER BY 1, 2", ids):
        members.setdefault(group, []).append(dict(zip(_MEMBER, row, strict=True)))
    if told:
        texts = {(g, m): rest for g, m, *rest in reader.query(_TOLD.format(those=CHOSEN), ids)}
        for group, found in members.items():
            for member in found:
                text, components = texts.get((group, member["member"]), (None, None))
                parts = None if components is None else json.loads(components)
                member |= {"text": text, "components": parts}
    return [each | {"members": members.get(each["group"], [])} for each in _heads(reader, chosen)]


def _heads(reader: TrajectoryReader, chosen: Sequence[int]) -> list[Record]:
    """The same without members."""
    rows = reader.query(GROUPS.format(those=CHOSEN), json.dumps(chosen))
    return [dict(zip(_GROUP, row, strict=False)) for row in rows]


def groups_of_step(reader: TrajectoryReader, step: int) -> list[Record]:
    """Groups that ended in `step`: its batch, and what was left out while its version was the
    newest; those with the widest spread of rewards first, and those without rewards last."""
    with reader.one_state():
        ended = reader.query(_ENDED_IN, step - 1)
        found = groups(reader, [group for (group,) in ended])

    def spread(group: Record) -> float:
        is_known = group["reward"] is not None
        return float(group["reward_max"] - group["reward_min"]) if is_known else -1.0

    return sorted(found, key=lambda group: (-spread(group), group["group"]))


def group(reader: TrajectoryReader, number: int) -> Record:
    """One group: its prompt, its responses with texts and rewards by function, and what became of
    the same prompt in all epochs.

    Raises:
        UserError: there is none.
    """
    rows = reader.query("SELECT row, prompt, columns FROM groups WHERE group_id = ?", number)
    if not rows:
        ((last,),) = reader.query("SELECT MAX(group_id) FROM groups")
        how_far = "there are none yet" if last is None else f"they go to {last}"
        raise UserError(f"{reader.path.parent}: has no group {number}; {how_far}")
    ((row, prompt, columns),) = rows
    (found,) = groups(reader, [number], told=True)
    same = reader.query(_SAME_PROMPT, row, number)
    epochs = _heads(reader, [each for (each,) in same])
    names = ("group", "epoch", "step", "reward", "length")
    return {
        **found,
        "prompt": codec.prompt_of(prompt),
        "columns": json.loads(columns),
        "epochs": [{name: each[name] for name in names} for each in epochs],
    }


__all__ = ["CHOSEN", "GROUPS", "SHOWN_PROMPT", "Record", "group", "groups", "groups_of_step"]
