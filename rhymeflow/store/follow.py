"""Follows a run's event store as it grows: reads new segments and rewards.

Each segment is returned once, in the order of storing. A response's reward comes with each segment
that is read after the reward was stored, and by itself if it was stored later. Groups that were
pruned before they were read are left out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rhymeflow.core.events import TrajectoryRewarded
from rhymeflow.core.types import GroupId, TrajectoryId
from rhymeflow.store import codec
from rhymeflow.store.handle import Reader
from rhymeflow.store.pruning import row_before_last

# SQLite numbers the rows of a table upwards: rows above a number are new.
_SEGMENTS = """SELECT s.rowid, group_id, member, start, tokens, length, reward
    FROM segments s LEFT JOIN trajectories USING (group_id, member)
    WHERE s.rowid > ? ORDER BY s.rowid LIMIT ?"""
_REWARDS = "SELECT kind, body FROM events WHERE seq > ? AND seq <= ? AND kind = ? ORDER BY seq"


class NewSegment(NamedTuple):
    """Tokens from position `start` on; `tokens` is int32 [n]. `length` and `reward` are those of
    the whole response, once it is finished and rewarded."""

    trajectory: TrajectoryId
    start: int
    tokens: np.ndarray
    length: int | None
    reward: float | None


class Follower:
    """Reads the last `num_tokens` tokens of a store, and then all that come."""

    def __init__(self, reader: Reader, *, num_tokens: int) -> None:
        self._reader = reader
        # Rewards first: a reward stored between the two reads comes with its segments.
        self._last_seq = self._last_event()
        self._last_row = row_before_last(reader.query, num_tokens)

    def segments(self, limit: int) -> list[NewSegment]:
        """Return up to `limit` next segments, [] if there are none yet."""
        rows = self._reader.query(_SEGMENTS, self._last_row, limit)
        if rows:
            self._last_row = rows[-1][0]
        return [
            NewSegment(
                TrajectoryId(group, member), start, np.frombuffer(tokens, "<i4"), length, reward
            )
            for _, group, member, start, tokens, length, reward in rows
        ]

    def rewards(self) -> list[TrajectoryRewarded]:
        """Return the rewards that were stored since the last call."""
        before, self._last_seq = self._last_seq, self._last_event()
        kind = TrajectoryRewarded.__name__
        rows = self._reader.query(_REWARDS, before, self._last_seq, kind)
        return [codec.decode(kind, body) for kind, body in rows]

    def prompt(self, group: GroupId) -> tuple[int, list[int]]:
        """Return a stored group's epoch and the tokens of its prompt."""
        ((epoch, prompt),) = self._reader.query(
            "SELECT epoch, prompt_tokens FROM groups WHERE group_id = ?", group
        )
        return epoch, np.frombuffer(prompt, "<i4").tolist()

    def _last_event(self) -> int:
        ((seq,),) = self._reader.query("SELECT COALESCE(MAX(seq), 0) FROM events")
        return int(seq)
