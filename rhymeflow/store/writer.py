"""The trajectory store: the run's event store and the tokens beside it, in one SQLite file.

Holds true:
- events are stored in the order they are recorded, numbered from 1 without holes;
- everything between two commits is one transaction: after a crash it is there whole or not at all,
  and every commit is there (after a crash of the machine: every commit up to the last durable one);
- what is delivered twice is stored once;
- one process writes; any number read meanwhile (`reader.TrajectoryReader`).

Knows nothing of what events mean: it stores what it is given.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import Any, Concatenate, ParamSpec, TypeVar

from rhymeflow.core.events import Event
from rhymeflow.core.types import Ending, FinishReason, GroupId, InstanceId, TrajectoryId, Version
from rhymeflow.store import codec, schema

_GROUP = """INSERT INTO groups (group_id, row, epoch, prompt, prompt_tokens, columns)
    VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"""
_SEGMENT = """INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET version = excluded.version, instance = excluded.instance,
    steps = excluded.steps, drafted = excluded.drafted,
    tokens = excluded.tokens, logprobs = excluded.logprobs
    WHERE length(excluded.tokens) > length(tokens)"""
_FINISHED = """INSERT INTO trajectories (group_id, member, length, reason)
    VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE
    SET length = excluded.length, reason = excluded.reason"""
_TEXT = "UPDATE trajectories SET text = ? WHERE group_id = ? AND member = ?"
_REWARD = "UPDATE trajectories SET reward = ?, components = ? WHERE group_id = ? AND member = ?"
_TRAINED = "UPDATE trajectories SET trained = ? WHERE group_id = ? AND member = ?"
_ENDING = """UPDATE groups SET ending = ?, ending_version = ?, ending_reason = ?
    WHERE group_id = ?"""
_HELD_OUT = "INSERT INTO held_out VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
_EVALUATION = """INSERT INTO evaluations VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE
    SET tokens = excluded.tokens, text = excluded.text, reward = excluded.reward"""
_EVENT = "INSERT INTO events VALUES (?, ?, ?, ?)"

_ORDER = (
    _GROUP,
    _SEGMENT,
    _FINISHED,
    _TEXT,
    _REWARD,
    _TRAINED,
    _ENDING,
    _HELD_OUT,
    _EVALUATION,
    _EVENT,
)
"""In which rows of one transaction are written: what changes a row after what makes it."""

_CHANGES_ONE = {_TEXT, _REWARD, _TRAINED, _ENDING}
"""Statements that are about a row that must be there."""

_Given = ParamSpec("_Given")
_Answer = TypeVar("_Answer")


def _counted(
    method: Callable[Concatenate[SqliteTrajectoryStore, _Given], _Answer],
) -> Callable[Concatenate[SqliteTrajectoryStore, _Given], _Answer]:
    """Count the time a method takes in `SqliteTrajectoryStore.seconds`."""

    @wraps(method)
    def counting(
        self: SqliteTrajectoryStore, *args: _Given.args, **kwargs: _Given.kwargs
    ) -> _Answer:
        started = perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.seconds += perf_counter() - started

    return counting


class SqliteTrajectoryStore:
    """The one writer of a run's `events.db`.

    What is put and recorded is kept until `commit`, and then written at once, statement by
    statement: a fifth of what row by row would cost.
    """

    def __init__(self, path: str | Path) -> None:
        """Create the store or open it to go on.

        Raises:
            UserError: the directory is missing or in use, or the file is of another schema.
        """
        self.path = Path(path)
        self.seconds = 0.0
        """Time spent in here: what storing costs the run."""
        self._connection, self._lock = schema.open_for_writing(self.path)
        (last,) = self._connection.execute("SELECT MAX(seq) FROM events").fetchone()
        self._last_seq: int = last or 0
        self._rows: dict[str, list[tuple[Any, ...]]] = {}

    @_counted
    def record(self, now: float, events: Sequence[Event]) -> None:
        """Append events in this order; `now` is the time handed to the coordinator, in seconds."""
        for event in events:
            self._last_seq += 1
            self._put(_EVENT, self._last_seq, now, *codec.encode(event))

    @_counted
    def put_group(
        self,
        group: GroupId,
        *,
        row: int,
        epoch: int,
        prompt: str | list[dict[str, Any]],
        prompt_tokens: Sequence[int],
        columns: Mapping[str, Any],
    ) -> None:
        """Store a prompt that was requested. Chat messages and columns are kept as JSON."""
        self._put(
            _GROUP,
            group,
            row,
            epoch,
            _prompt(prompt),
            _int32(prompt_tokens),
            codec.to_json(columns),
        )

    @_counted
    def origin(self, group: GroupId) -> tuple[int, int]:
        """The row and epoch of a group that was requested."""
        self._write()
        found = self._connection.execute(
            "SELECT row, epoch FROM groups WHERE group_id = ?", (group,)
        ).fetchone()
        assert found, f"group {group} was never requested"
        row, epoch = found
        return row, epoch

    @_counted
    def put_segment(
        self,
        trajectory: TrajectoryId,
        *,
        start: int,
        version: Version,
        instance: InstanceId,
        steps: int,
        drafted: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
    ) -> None:
        """Store the tokens from position `start` on that `instance` generated under `version`.

        It took `steps` iterations, in which `drafted` tokens were proposed and verified.
        A segment that grew is delivered again from the same start: the longer one stays, in
        whichever order they come. One without tokens leaves no trace.
        """
        assert len(tokens) == len(logprobs), f"{trajectory}: {len(tokens)} != {len(logprobs)}"
        if not len(tokens):
            return
        self._put(
            _SEGMENT,
            *trajectory,
            start,
            version,
            instance,
            steps,
            drafted,
            _int32(tokens),
            struct.pack(f"<{len(logprobs)}f", *logprobs),
        )

    @_counted
    def put_finished(self, trajectory: TrajectoryId, *, length: int, reason: FinishReason) -> None:
        """Store that the response is complete with `length` tokens."""
        self._put(_FINISHED, *trajectory, length, reason)

    @_counted
    def put_text(self, trajectory: TrajectoryId, text: str) -> None:
        """Store the text of a finished response."""
        self._put(_TEXT, text, *trajectory)

    @_counted
    def put_reward(
        self, trajectory: TrajectoryId, *, reward: float, components: Mapping[str, float]
    ) -> None:
        """Store a finished response's weighted sum of rewards, and each by its function's name."""
        self._put(_REWARD, float(reward), codec.to_json(components), *trajectory)

    @_counted
    def put_consumed(self, group: GroupId, *, version: Version, members: Sequence[int]) -> None:
        """Store that these members of the group are trained on as part of batch `version`."""
        self._put(_ENDING, "consumed", version, None, group)
        for member in members:
            self._put(_TRAINED, version, group, member)

    @_counted
    def put_ending(self, group: GroupId, ending: Ending, *, version: Version, reason: str) -> None:
        """Store that the group was left out for `reason` when `version` was the newest."""
        self._put(_ENDING, ending, version, reason, group)

    @_counted
    def put_held_out(
        self, row: int, *, prompt: str | list[dict[str, Any]], prompt_tokens: Sequence[int]
    ) -> None:
        """Store a held-out prompt; one that is there stays."""
        self._put(_HELD_OUT, row, _prompt(prompt), _int32(prompt_tokens))

    @_counted
    def put_evaluation(
        self, version: Version, row: int, *, tokens: Sequence[int], text: str, reward: float
    ) -> None:
        """Store the answer to one held-out prompt under `version`, and its reward."""
        self._put(_EVALUATION, version, row, _int32(tokens), text, float(reward))

    @_counted
    def commit(self, *, durable: bool = False) -> None:
        """End the transaction: readers see it, and it survives the death of this process.

        `durable`: also the loss of power, and with it all before. Costs a disk flush, so it is for
        version boundaries.
        """
        self._write()
        if self._connection.in_transaction:
            self._connection.execute("COMMIT")
        if durable:
            self._flush()

    def close(self) -> None:
        """Release the file. What was not committed is dropped, as in a crash."""
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")
        self._connection.close()
        os.close(self._lock)

    def _flush(self) -> None:
        # In WAL mode a commit at FULL flushes the whole journal, and with it the commits before,
        # which were written at NORMAL. The mark is there so that there is something to commit.
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute(
            "INSERT OR REPLACE INTO meta VALUES ('durable_seq', ?)", (self._last_seq,)
        )
        self._connection.execute("PRAGMA synchronous = NORMAL")

    def _put(self, statement: str, *values: Any) -> None:
        self._rows.setdefault(statement, []).append(values)

    def _write(self) -> None:
        """Bring all that was put into the transaction."""
        if self._rows and not self._connection.in_transaction:
            self._connection.execute("BEGIN IMMEDIATE")
        for statement in _ORDER:
            rows = self._rows.pop(statement, None)
            if rows is None:
                continue
            try:
                changed = self._connection.executemany(statement, rows).rowcount
            except sqlite3.Error as error:
                error.add_note(f"while writing to {self.path}")
                raise
            assert statement not in _CHANGES_ONE or changed == len(rows), (
                f"{statement}: {len(rows)} rows were to change, and {changed} did"
            )


def _prompt(prompt: str | list[dict[str, Any]]) -> str:
    return prompt if isinstance(prompt, str) else codec.to_json(prompt)


def _int32(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)
