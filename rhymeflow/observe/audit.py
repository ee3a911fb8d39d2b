"""Counts what breaks a law in a run's log and store: the last line of every run.

It believes nothing that the run says of itself. `examples/audit_run.py` checks the same laws with
the standard library alone, and names each trajectory."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.utils.bounds import bound_of

_TRAINED = """WITH trained AS (
    SELECT json_extract(c.body, '$.version') AS version, g.value AS group_id, m.value AS member
    FROM commands c, json_each(c.body, '$.groups') g,
        json_each(json_extract(c.body, '$.members[' || g.key || ']')) m
    WHERE c.kind = 'Train')"""

_ROUTED = """(SELECT json_extract(body, '$.trajectory[0]') AS group_id,
        json_extract(body, '$.trajectory[1]') AS member,
        MIN(json_extract(body, '$.version')) AS version
    FROM commands WHERE kind = 'Route' GROUP BY 1, 2)"""

# Of the trajectory as a whole the first route counts, which none of its tokens may precede.
_STALE = f"""{_TRAINED}
SELECT COUNT(*) FROM trained t LEFT JOIN {_ROUTED} r USING (group_id, member)
LEFT JOIN (SELECT group_id, member, MIN(version) AS oldest, MAX(version) AS newest
        FROM (SELECT group_id, member, version FROM segments
            UNION ALL SELECT group_id, member, version FROM pruned)
        GROUP BY group_id, member) s USING (group_id, member)
WHERE NOT COALESCE(r.version <= s.oldest AND s.newest <= t.version
    AND t.version - r.version <= ?, FALSE)"""

_ENDS = f"""{_TRAINED}, ends AS (SELECT group_id, 'consumed' AS ending FROM trained
        GROUP BY version, group_id
    UNION ALL SELECT json_extract(body, '$.group'), json_extract(body, '$.ending')
        FROM commands WHERE kind = 'Drop')"""

_TWICE = f"""{_ENDS}
SELECT (SELECT COUNT(*) FROM trained) -
    (SELECT COUNT(*) FROM (SELECT DISTINCT group_id, member FROM trained)) +
    (SELECT COUNT(*) - COUNT(DISTINCT group_id) FROM ends)"""

# The log and the table agree on endings; in a run that is over, every routed group has one.
_LOST = f"""{_ENDS}, routed AS (SELECT DISTINCT group_id FROM {_ROUTED}),
    ids AS (SELECT group_id FROM ends UNION SELECT * FROM routed UNION SELECT group_id FROM groups)
SELECT COUNT(*) FROM ids LEFT JOIN groups g USING (group_id) LEFT JOIN ends e USING (group_id)
WHERE ids.group_id >= 0 AND (g.group_id IS NULL OR g.ending IS NOT e.ending
    OR (?1 AND e.ending IS NULL AND ids.group_id IN routed))"""

_NOT_TRAINED = f"""{_TRAINED}
SELECT COUNT(*) FROM (SELECT version, group_id, member FROM trained
    UNION SELECT trained, group_id, member FROM trajectories WHERE trained IS NOT NULL) u
LEFT JOIN trajectories t USING (group_id, member)
WHERE t.trained IS NOT u.version
    OR (u.version, group_id, member) NOT IN (SELECT * FROM trained)"""

_OVER = """SELECT COALESCE(MAX(seq) FILTER (WHERE kind = 'Finish') >
    COALESCE(MAX(seq) FILTER (WHERE kind = 'Route'), 0), FALSE)
    FROM commands WHERE kind IN ('Finish', 'Route')"""

_PUBLISHED = """SELECT json_extract(body, '$.version'), json_extract(body, '$.checksum')
    FROM events WHERE kind IN ('LearnerReady', 'VersionPublished')"""
_SHOWN = """SELECT DISTINCT json_extract(body, '$.instance'), json_extract(body, '$.version'),
    json_extract(body, '$.checksum') FROM events WHERE kind IN ('InstanceJoined', 'Pulled')"""
_GENERATED = """SELECT instance, version FROM segments WHERE steps > 0
    UNION SELECT instance, version FROM pruned WHERE steps > 0"""

_ERRORS = """SELECT COUNT(*) FROM trajectories t WHERE trained IS NOT NULL AND (reward IS NULL
    OR (group_id, member) NOT IN (SELECT json_extract(body, '$.trajectory[0]'),
        json_extract(body, '$.trajectory[1]') FROM events WHERE kind = 'TrajectoryRewarded'))"""


@dataclass(frozen=True)
class LogAudit:
    """How often each law was broken. All counts of a sound run are 0, but for `proved`."""

    stale: int
    """Trajectories trained on outside the staleness bound, by their first route or any token."""
    lost: int  # groups without an ending, or with another than was decided; trajectories likewise
    twice: int  # groups that ended, and trajectories that were trained on, more than once
    proved: int  # pulls whose checksum is the published one
    unproved: int  # pulls with another checksum, and those that generated tokens without any
    errors: int  # trajectories trained on without a reward from the reward functions

    @property
    def is_clean(self) -> bool:
        """Whether every law held."""
        return not (self.stale or self.lost or self.twice or self.unproved or self.errors)

    @property
    def line(self) -> str:
        """The counts on one line."""
        pulls = f"{self.unproved:,} of {self.proved + self.unproved:,} pulls NOT proved"
        if not self.unproved:
            pulls = f"all {self.proved:,} pulls proved"
        counts = f"{self.stale:,} stale, {self.lost:,} lost, {self.twice:,} twice"
        return f"{counts}, {pulls}, {self.errors:,} errors as rewards"


def audit_run(reader: TrajectoryReader) -> LogAudit:
    """Check laws 1, 2 and 5 of ARCHITECTURE.md and the rewards, of a run that has an attempt."""
    schedule = json.loads(reader.attempts()[-1].config)["schedule"]
    bound = bound_of(schedule["name"], schedule["max_staleness"])

    def count(statement: str, *values: object) -> int:
        return int(reader.query(statement, *values)[0][0])

    is_over = bool(count(_OVER))
    proved, unproved = _pulls(reader, is_over=is_over)
    return LogAudit(
        stale=count(_STALE, bound),
        lost=count(_LOST, is_over) + count(_NOT_TRAINED),
        twice=count(_TWICE),
        proved=proved,
        unproved=unproved,
        errors=count(_ERRORS),
    )


def _pulls(reader: TrajectoryReader, *, is_over: bool) -> tuple[int, int]:
    """Return how many pulls showed the published checksum and how many did not. A run that was
    killed may lack the publication of its last version, which instances had pulled already."""
    published = set(reader.query(_PUBLISHED))
    newest = None if is_over else 1 + max((version for version, _ in published), default=-1)
    shown = set(reader.query(_SHOWN))
    proved = {p for p in shown if (p[1], p[2]) in published or p[1] == newest}
    known = {(instance, version) for instance, version, _ in proved}
    return len(proved), len(shown - proved) + len(set(reader.query(_GENERATED)) - known)
