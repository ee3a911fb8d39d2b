"""Writes the trajectory store: a run's events and tokens in one SQLite file.

One process writes, any number read (`reader.py`). Everything between two commits is one transaction
(`transaction.py`). The controller commits before it sends a message about stored rows (a batch to
train on, a published version), so the receiver finds them."""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeVar

from rhymeflow.core.commands import Command
from rhymeflow.core.events import Event
from rhymeflow.core.types import (
    Ending,
    FinishReason,
    GroupId,
    InstanceId,
    SuiteName,
    TrajectoryId,
    Version,
)
from rhymeflow.store import codec, schema
from rhymeflow.store.pruning import Pruner
from rhymeflow.store.schema import ENVIRONMENT, GIVEN
from rhymeflow.store.transaction import Statement, Transaction

_WANTED = "group_id IN (SELECT value FROM json_each(?))"
_PROMPTS_OF = f"SELECT group_id, row, epoch, prompt, prompt_tokens FROM groups WHERE {_WANTED}"
_TOKENS_OF = f"""SELECT group_id, member, tokens, version, steps = 0
    FROM segments WHERE {_WANTED}
    ORDER BY group_id, member, start"""
_FINISHED_OF = f"SELECT group_id, member, reason FROM trajectories WHERE {_WANTED}"


class GroupProgress(NamedTuple):
    """What is stored of a group; dictionaries have members as keys."""

    row: int
    epoch: int
    prompt: str
    prompt_ids: list[int]
    tokens: dict[int, array[int]]  # tokens of each member that has any
    finished: dict[int, FinishReason]
    versions: dict[int, Version]
    """For each member with tokens, the version that generated the last one."""
    observations: dict[int, list[tuple[int, int]]]
    """For each member that has any, the start and end of each observation, in tokens."""


_Class = TypeVar("_Class", bound=type)


def _counts_time(store: _Class) -> _Class:
    """Decorate a class so that the time in its public methods is added to `seconds`."""

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
            started = perf_counter()
            try:
                return method(self, *args, **kwargs)
            finally:
                self.seconds += perf_counter() - started

        return counting

    for name, method in list(vars(store).items()):
        if not name.startswith("_"):
            setattr(store, name, counted(method))
    return store


@_counts_time
class SqliteTrajectoryStore:
    """The one writer of a run's `events.db`. What is put twice is stored once."""

    def __init__(self, path: str | Path, *, is_new: bool = False) -> None:
        """Open or create the store. Raises `UserError` if the directory is missing or in use, the
        file has another schema version, or it exists and `is_new`."""
        self.path = Path(path)
        self.seconds = 0.0  # seconds spent in public methods: what storing costs the run
        self._transaction = Transaction(self.path, is_new=is_new)
        self._connection, self._put = self._transaction.connection, self._transaction.put
        self._pruner = Pruner(self._connection)
        self._changed: dict[tuple[str, int, int], None] = {}
        """Table and key of rows that were put or changed since the last commit."""
        self._last_seq = self._last("events")
        self._last_command = self._last("commands")
        self._attempt = self._last("attempts", "attempt")
        self._last_snapshot = self._last("snapshots", "event")

    def begin_attempt(self, config: str, *, now: float, started: str) -> int:
        """Begin an attempt `now`, in seconds since the run began, at the date and time `started`;
        return its number, from 1."""
        self._attempt += 1
        with self._transaction.writing():
            schema.note_writer(self._connection)
        values = self._attempt, self._last_seq + 1, now, started, config
        self._change("attempts", (self._attempt,), Statement.ATTEMPT, *values)
        return self._attempt

    def put_config(self, config: str) -> None:
        """Replace the configuration (JSON text) that this attempt began with."""
        self._change("attempts", (self._attempt,), Statement.CONFIG, config, self._attempt)

    def digests(self) -> dict[str, str]:
        """Return what `put_digests` stored, {} if nothing."""
        row = self._connection.execute("SELECT value FROM meta WHERE key = 'rows'").fetchone()
        return json.loads(row[0]) if row else {}

    def put_digests(self, digests: Mapping[str, str]) -> None:
        """Store digests of the data rows that the run began with, by what the rows are used for,
        and of files with code."""
        with self._transaction.writing():
            self._connection.execute(
                "INSERT OR REPLACE INTO meta VALUES ('rows', ?)", (json.dumps(digests),)
            )

    def forget_groups(self, first: GroupId) -> None:
        """Delete the groups from number `first` on. No event may name one of them."""
        delete = "DELETE FROM groups WHERE group_id >= ? RETURNING group_id"
        for (group,) in self._query(delete, first):
            self._changed["groups", group, 0] = None

    def endings(self) -> dict[str, int]:
        """Return the number of training groups by ending."""
        rows = self._query(
            "SELECT ending, COUNT(*) FROM groups"
            " WHERE ending IS NOT NULL AND suite IS NULL GROUP BY 1"
        )
        return dict(rows)

    def record(self, now: float, events: Sequence[Event]) -> int:
        """Append events at `now`, in seconds since the run began; return the first one's number."""
        first = self._last_seq + 1
        for event in events:
            self._last_seq += 1
            self._put(Statement.EVENT, self._last_seq, now, *codec.encode(event))
        return first

    def record_command(self, event: int, command: Command) -> None:
        """Append a command that event number `event` caused."""
        self._last_command += 1
        self._put(Statement.COMMAND, self._last_command, event, *codec.encode(command))

    def put_snapshot(self, event: int, state: bytes) -> None:
        """Store the coordinator's state after this event. The last two snapshots are kept."""
        self._put(Statement.SNAPSHOT, event, state)
        self._put(Statement.OLD_SNAPSHOTS, self._last_snapshot)
        self._last_snapshot = event

    def put_group(
        self,
        group: GroupId,
        *,
        row: int,
        epoch: int,
        prompt: str | list[dict[str, Any]],
        prompt_tokens: Sequence[int],
        columns: Mapping[str, Any],
        suite: SuiteName | None = None,
        version: Version | None = None,
    ) -> None:
        """Store a group's prompt; chat messages and columns are stored as JSON. With `suite`, the
        group answers that suite's prompt for the evaluation of `version`."""
        text = prompt if isinstance(prompt, str) else codec.to_json(prompt)
        encoded = text, _int32(prompt_tokens), codec.to_json(columns)
        values = group, row, epoch, *encoded, suite, version
        self._change("groups", (group,), Statement.GROUP, *values)

    def suite_groups(self) -> tuple[GroupId, dict[GroupId, tuple[SuiteName, Version]]]:
        """Return the lowest group number of a suite (0 if there is none), and the suite and version
        of each suite's group that has not ended."""
        ((lowest,),) = self._query("SELECT MIN(group_id) FROM groups")
        unfinished = self._query(
            "SELECT group_id, suite, evaluates FROM groups WHERE group_id < 0 AND ending IS NULL"
        )
        return min(lowest or 0, 0), {group: (suite, v) for group, suite, v in unfinished}

    def origin(self, group: GroupId) -> tuple[int, int]:
        """Return the data row and the epoch of a stored group."""
        rows = self._query("SELECT row, epoch FROM groups WHERE group_id = ?", group)
        assert rows, f"group {group} was never requested"
        row, epoch = rows[0]
        return row, epoch

    def progress(self, groups: Iterable[GroupId]) -> dict[GroupId, GroupProgress]:
        """Return what is stored of these groups, by group."""
        wanted = json.dumps(list(groups))
        progress = {
            group: GroupProgress(row, epoch, prompt, array("i", tokens).tolist(), {}, {}, {}, {})
            for group, row, epoch, prompt, tokens in self._query(_PROMPTS_OF, wanted)
        }
        for group, member, blob, version, is_observed in self._query(_TOKENS_OF, wanted):
            tokens = progress[group].tokens.setdefault(member, array("i"))
            progress[group].versions[member] = version
            start = len(tokens)
            tokens.frombytes(blob)
            if is_observed:
                progress[group].observations.setdefault(member, []).append((start, len(tokens)))
        for group, member, reason in self._query(_FINISHED_OF, wanted):
            progress[group].finished[member] = reason
        return progress

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
        accepted: bytes | None = None,
    ) -> None:
        """Store the tokens from position `start` on that `instance` generated under `version`.

        They took `steps` iterations, in which `drafted` tokens were proposed and verified.
        `accepted`, if known, has one byte per token: 1 if it was drafted, else 0. A segment that
        grew is put again, with the same start: the longest is kept. One without tokens is left out.
        """
        assert len(tokens) == len(logprobs), f"{trajectory}: {len(tokens)} != {len(logprobs)}"
        assert accepted is None or len(accepted) == len(tokens), f"{trajectory}: {len(accepted)}"
        if not len(tokens):
            return
        origin = version, instance, steps, drafted
        content = _int32(tokens), struct.pack(f"<{len(logprobs)}f", *logprobs), accepted
        self._put(Statement.SEGMENT, *trajectory, start, *origin, *content, None)
        self._pruner.put(len(tokens))

    def put_observed(
        self,
        trajectory: TrajectoryId,
        *,
        start: int,
        version: Version,
        tokens: Sequence[int],
        follows: int | None = None,
    ) -> None:
        """Store an environment's observation, from position `start` on. Its tokens took no
        iterations and have no log-probabilities. `follows`: of an agent's call; see
        `branches.py`."""
        origin = version, ENVIRONMENT, 0, 0
        content = _int32(tokens), b"", None, follows
        self._put(Statement.SEGMENT, *trajectory, start, *origin, *content)
        self._pruner.put(len(tokens))

    def put_span(
        self,
        trajectory: TrajectoryId,
        *,
        start: int,
        length: int,
        version: Version,
        instance: InstanceId,
        steps: int,
        drafted: int,
    ) -> None:
        """Store a segment without its tokens, as `prune` leaves it."""
        values = start, length, version, instance, steps, drafted
        self._change("pruned", (trajectory.group,), Statement.SPAN, *trajectory, *values)

    def put_finished(self, trajectory: TrajectoryId, *, length: int, reason: FinishReason) -> None:
        """Store that the response is complete with `length` tokens."""
        self._change("trajectories", trajectory, Statement.FINISHED, *trajectory, length, reason)

    def put_text(self, trajectory: TrajectoryId, text: str) -> None:
        """Store the text of a finished response."""
        self._change("trajectories", trajectory, Statement.TEXT, text, *trajectory)

    def put_reward(
        self, trajectory: TrajectoryId, *, reward: float, components: Mapping[str, float]
    ) -> None:
        """Store a response's weighted sum of rewards, and the unweighted ones by function."""
        values = float(reward), codec.to_json(components)
        self._change("trajectories", trajectory, Statement.REWARD, *values, *trajectory)

    def judged(self, trajectory: TrajectoryId) -> tuple[str, float | None]:
        """Return the text and the reward of a finished response."""
        query = f"SELECT text, {GIVEN} FROM trajectories WHERE group_id = ? AND member = ?"
        ((text, reward),) = self._query(query, *trajectory)
        return text or "", reward

    def mean_rewards(self, groups: Iterable[GroupId]) -> dict[str, float]:
        """Return the mean of each function's rewards over the judged responses of groups."""
        query = """SELECT each.key, AVG(each.value) FROM trajectories, json_each(components) AS each
            WHERE group_id IN (SELECT value FROM json_each(?)) AND reward IS NOT NULL GROUP BY 1"""
        return dict(self._query(query, codec.to_json(list(groups))))

    def put_consumed(self, group: GroupId, *, version: Version, members: Sequence[int]) -> None:
        """Store that batch `version` trains on these members of the group."""
        self.put_ending(group, "consumed", version=version)
        for member in members:
            self._change("trajectories", (group, member), Statement.TRAINED, version, group, member)

    def put_token_details(
        self, trajectory: TrajectoryId, logprobs: bytes | None, flags: bytes
    ) -> None:
        """Store what the learner computed for each token (`learner/token_details.py`)."""
        self._change(
            "token_details", trajectory, Statement.TOKEN_DETAILS, *trajectory, logprobs, flags
        )

    def put_ending(
        self,
        group: GroupId,
        ending: Ending | Literal["consumed", "evaluated"],
        *,
        version: Version,
        reason: str | None = None,
    ) -> None:
        """Store how a group ended: it was consumed by batch `version`, answered for the evaluation
        of `version`, or left out for `reason` when `version` was the newest."""
        self._change("groups", (group,), Statement.ENDING, ending, version, reason, group)
        if group >= 0:
            self._pruner.ended(group, version)

    def prune(self, *, before: Version, history_tokens: int) -> None:
        """Delete some of the tokens that are not needed any more; see `Pruner.prune`."""
        self._transaction.write()
        with self._transaction.writing():
            self._pruner.prune(before, history_tokens)

    def commit(self, *, durable: bool = False) -> None:
        """End the transaction: readers see it, and it survives the death of this process. With
        `durable`, which costs a disk flush, it also survives a loss of power. Raises `StorageError`
        if the disk is full, or the file was deleted or damaged."""
        for change in self._changed:
            self._put(Statement.CHANGE, *change)
        self._changed.clear()
        self._transaction.commit(durable_seq=self._last_seq if durable else None)

    def close(self) -> None:
        """See `Transaction.close`."""
        self._transaction.close()

    def close_if_missing(self) -> None:
        """See `Transaction.close_if_missing`."""
        self._transaction.close_if_missing()

    def _change(self, table: str, key: tuple[int, ...], statement: Statement, *values: Any) -> None:
        """Put the values of `statement`, which inserts or updates the row `key` of a table."""
        self._changed[table, key[0], key[1] if len(key) > 1 else 0] = None
        self._put(statement, *values)

    def _query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a statement, which sees everything that was put."""
        self._transaction.write()
        return self._connection.execute(statement, values).fetchall()

    def _last(self, table: str, column: str = "seq") -> int:
        ((last,),) = self._query(f"SELECT MAX({column}) FROM {table}")
        return last or 0


def _int32(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)
