"""Reading a run's event store: the learner's batches, replay, and what `inspect` shows.

Holds true: nothing here writes; every answer is one consistent state of the store, also while the
controller goes on writing. A batch comes whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rhymeflow.core.events import Event
from rhymeflow.core.types import FinishReason, GroupId, InstanceId, TrajectoryId, Version
from rhymeflow.servers import codec, schema


class IncompleteBatch(RuntimeError):  # noqa: N818 - it is what happened
    """A group that was to be read whole is not: the message says which trajectory lacks what."""


class Recorded(NamedTuple):
    """One line of the log."""

    seq: int
    time: float
    event: Event


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """Tokens from position `start` on, made by `instance` under `version`.

    It took `steps` iterations, in which `drafted` tokens were proposed and verified.
    """

    start: int
    version: Version
    instance: InstanceId
    steps: int
    drafted: int
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class TrajectoryRecord:
    """A finished and judged response, ready to be trained on.

    `completion_ids`, `logprobs` (under the policy that sampled) and `versions` have one entry per
    token.
    """

    group: GroupId
    member: int
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    versions: list[Version]
    reward: float
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class TrajectoryDetails:
    """Everything that is stored about one response, for people; what is not there yet is `None`."""

    trajectory: TrajectoryId
    row: int
    epoch: int
    prompt: str
    columns: dict[str, Any]
    segments: list[StoredSegment]
    length: int | None
    reason: FinishReason | None
    text: str | None
    reward: float | None
    components: dict[str, float] | None
    trained: Version | None
    """The batch it was trained on in."""
    ending: str | None
    ending_version: Version | None
    ending_reason: str | None


class TrajectoryReader:
    """A read-only view of a run's `events.db`."""

    def __init__(self, path: str | Path) -> None:
        """Open the store.

        Raises:
            UserError: there is none, or it is of another schema.
        """
        self._connection = schema.open_for_reading(Path(path))

    def close(self) -> None:
        """Release the file."""
        self._connection.close()

    def events(self) -> Iterator[Recorded]:
        """The log from its beginning, in order."""
        rows = self._connection.execute("SELECT seq, time, kind, body FROM events ORDER BY seq")
        for seq, time, kind, body in rows:
            yield Recorded(seq, time, codec.decode(kind, body))

    def batch(
        self, groups: Sequence[GroupId], members: Sequence[Sequence[int]]
    ) -> list[TrajectoryRecord]:
        """Return records of these members of each group: groups and members as given.

        Raises:
            IncompleteBatch: a prompt, member, token or reward is missing.
        """
        self._connection.execute("BEGIN")
        try:
            return [
                self._record(TrajectoryId(group, member), prompt)
                for group, chosen in zip(groups, members, strict=True)
                for prompt in [self._prompt_tokens(group)]
                for member in chosen
            ]
        finally:
            self._connection.execute("COMMIT")

    def details(self, trajectory: TrajectoryId) -> TrajectoryDetails | None:
        """Return what is stored about one response, `None` if nothing is."""
        group = self.query(
            "SELECT row, epoch, prompt, columns, ending, ending_version, ending_reason"
            " FROM groups WHERE group_id = ?",
            trajectory.group,
        )
        segments = self._segments(trajectory)
        finished = self.query(
            "SELECT length, reason, text, reward, components, trained FROM trajectories"
            " WHERE group_id = ? AND member = ?",
            *trajectory,
        )
        if not group or not (segments or finished):
            return None
        row, epoch, prompt, columns, *ending = group[0]
        length, reason, text, reward, components, trained = finished[0] if finished else (None,) * 6
        return TrajectoryDetails(
            trajectory,
            row,
            epoch,
            prompt,
            json.loads(columns),
            segments,
            length,
            reason,
            text,
            reward,
            json.loads(components) if components else None,
            trained,
            *ending,
        )

    def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Rows of one SQL statement over the tables and views of `schema`."""
        return self._connection.execute(statement, values).fetchall()

    def _prompt_tokens(self, group: GroupId) -> list[int]:
        found = self.query("SELECT prompt_tokens FROM groups WHERE group_id = ?", group)
        if not found:
            raise IncompleteBatch(f"group {group}: its prompt is not stored")
        return _unpacked(found[0][0], "<i4")

    def _record(self, trajectory: TrajectoryId, prompt_ids: list[int]) -> TrajectoryRecord:
        found = self.query(
            "SELECT length, reason, reward FROM trajectories WHERE group_id = ? AND member = ?",
            *trajectory,
        )
        if not found:
            raise IncompleteBatch(f"trajectory {trajectory}: has not finished")
        length, reason, reward = found[0]
        if reward is None:
            raise IncompleteBatch(f"trajectory {trajectory}: has no reward")
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        for segment in self._segments(trajectory):
            if segment.start != len(tokens):
                raise IncompleteBatch(
                    f"trajectory {trajectory}: tokens go to {len(tokens)}, but the next segment"
                    f" starts at {segment.start}"
                )
            tokens += segment.tokens
            logprobs += segment.logprobs
            versions += [segment.version] * len(segment.tokens)
        if len(tokens) != length:
            raise IncompleteBatch(
                f"trajectory {trajectory}: {len(tokens)} tokens are stored of {length}"
            )
        return TrajectoryRecord(*trajectory, prompt_ids, tokens, logprobs, versions, reward, reason)

    def _segments(self, trajectory: TrajectoryId) -> list[StoredSegment]:
        rows = self.query(
            "SELECT start, version, instance, steps, drafted, tokens, logprobs FROM segments"
            " WHERE group_id = ? AND member = ? ORDER BY start",
            *trajectory,
        )
        return [
            StoredSegment(
                start,
                version,
                instance,
                steps,
                drafted,
                _unpacked(tokens, "<i4"),
                _unpacked(logprobs, "<f4"),
            )
            for start, version, instance, steps, drafted, tokens, logprobs in rows
        ]


def _unpacked(blob: bytes, dtype: str) -> list[Any]:
    numbers: list[Any] = np.frombuffer(blob, dtype).tolist()
    return numbers
