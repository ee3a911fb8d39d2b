"""The trajectory store: a run's events and tokens in one SQLite file.

One process writes, any number read (`reader.py`). All between two commits is one transaction
(`transaction.py`). What a message names (a batch to train on, a published version) is committed
before the message is sent, so the receiver finds it.
"""

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
from rhymeflow.store.schema import ENVIRONMENT
from rhymeflow.store.statements import FINISHED_OF, PROMPTS_OF, TOKENS_OF, Statement
from rhymeflow.store.transaction import Transaction


class GroupProgress(NamedTuple):
    """What is stored of a group."""

    row: int
    epoch: int
    prompt: str
    prompt_ids: list[int]
    tokens: dict[int, array[int]]
    """Of each member that has some."""
    finished: dict[int, FinishReason]
    versions: dict[int, Version]
    """Of each of these members, the version that generated its last token."""
    turns: dict[int, list[tuple[int, int]]]
    """Of each member that an environment answered: for each answer, in order, how many tokens
    there were before it and with it."""


_Class = TypeVar("_Class", bound=type)


def _counts_time(store: _Class) -> _Class:
    """Count the time that its public methods take in `seconds`."""

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
    """The one writer of a run's `events.db`. What is delivered twice is stored once."""

    def __init__(self, path: str | Path, *, is_new: bool = False) -> None:
        """Open the store, or create it. Raises `UserError` if the directory is missing or in use,
        the file is of another schema, or there is one and `is_new`."""
        self.path = Path(path)
        self.seconds = 0.0
        """Time spent in here: what storing costs the run."""
        self._transaction = Transaction(self.path, is_new=is_new)
        self._connection, self._put = self._transaction.connection, self._transaction.put
        self._pruner = Pruner(self._connection)
        self._changed: dict[tuple[str, int, int], None] = {}
        """Rows that are put or changed with the next commit, by table and key."""
        self._last_seq = self._last("events")
        self._last_command = self._last("commands")
        self._attempt = self._last("attempts", "attempt")
        self._last_snapshot = self._last("snapshots", "event")

    def begin_attempt(self, config: str, *, now: float, started: str) -> int:
        """Begin to write for an attempt at the run; return its number, from 1. `started` is the
        date and time, and `config` its configuration as JSON text."""
        self._attempt += 1
        with self._transaction.writing():
            schema.note_writer(self._connection)
        values = self._attempt, self._last_seq + 1, now, started, config
        self._change("attempts", (self._attempt,), Statement.ATTEMPT, *values)
        return self._attempt

    def put_config(self, config: str) -> None:
        """Store this attempt's configuration as JSON text, in place of the one it began with."""
        self._change("attempts", (self._attempt,), Statement.CONFIG, config, self._attempt)

    def digests(self) -> dict[str, str]:
        """Digests of the rows that the run began with, by what they are for."""
        found = self._connection.execute("SELECT value FROM meta WHERE key = 'rows'").fetchone()
        return json.loads(found[0]) if found else {}

    def put_digests(self, digests: Mapping[str, str]) -> None:
        """Store digests of rows."""
        with self._transaction.writing():
            self._connection.execute(
                "INSERT OR REPLACE INTO meta VALUES ('rows', ?)", (json.dumps(digests),)
            )

    def forget_groups(self, first: GroupId) -> None:
        """Delete groups from `first` on, whose prompts were stored and which no event names."""
        gone = "DELETE FROM groups WHERE group_id >= ? RETURNING group_id"
        for (group,) in self._ask(gone, first):
            self._changed["groups", group, 0] = None

    def endings(self) -> dict[str, int]:
        """How many groups ended in each way."""
        found = self._ask(
            "SELECT ending, COUNT(*) FROM groups"
            " WHERE ending IS NOT NULL AND suite IS NULL GROUP BY 1"
        )
        return dict(found)

    def record(self, now: float, events: Sequence[Event]) -> int:
        """Append events in this order; return the number of the first. `now` is the time since the
        run began, in seconds."""
        first = self._last_seq + 1
        for event in events:
            self._last_seq += 1
            self._put(Statement.EVENT, self._last_seq, now, *codec.encode(event))
        return first

    def record_command(self, event: int, command: Command) -> None:
        """Append what was commanded upon the event of this number."""
        self._last_command += 1
        self._put(Statement.COMMAND, self._last_command, event, *codec.encode(command))

    def put_snapshot(self, event: int, state: bytes) -> None:
        """Store the coordinator's state after this event; all but the last two are dropped."""
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
        """Store a prompt that was requested. Chat messages and columns are kept as JSON."""
        text = prompt if isinstance(prompt, str) else codec.to_json(prompt)
        given = text, _int32(prompt_tokens), codec.to_json(columns)
        self._change("groups", (group,), Statement.GROUP, group, row, epoch, *given, suite, version)

    def suite_groups(self) -> tuple[GroupId, dict[GroupId, tuple[SuiteName, Version]]]:
        """The lowest number of a suite's group, and those that have not ended."""
        ((lowest,),) = self._ask("SELECT MIN(group_id) FROM groups")
        going_on = self._ask(
            "SELECT group_id, suite, evaluates FROM groups WHERE group_id < 0 AND ending IS NULL"
        )
        return min(lowest or 0, 0), {group: (suite, v) for group, suite, v in going_on}

    def origin(self, group: GroupId) -> tuple[int, int]:
        """The row and epoch of a group that was requested."""
        found = self._ask("SELECT row, epoch FROM groups WHERE group_id = ?", group)
        assert found, f"group {group} was never requested"
        row, epoch = found[0]
        return row, epoch

    def progress(self, groups: Iterable[GroupId]) -> dict[GroupId, GroupProgress]:
        """What is stored of these groups."""
        wanted = json.dumps(list(groups))
        found = {
            group: GroupProgress(row, epoch, prompt, array("i", tokens).tolist(), {}, {}, {}, {})
            for group, row, epoch, prompt, tokens in self._ask(PROMPTS_OF, wanted)
        }
        for group, member, blob, version, is_observed in self._ask(TOKENS_OF, wanted):
            tokens = found[group].tokens.setdefault(member, array("i"))
            found[group].versions[member] = version
            before = len(tokens)
            tokens.frombytes(blob)
            if is_observed:
                found[group].turns.setdefault(member, []).append((before, len(tokens)))
        for group, member, reason in self._ask(FINISHED_OF, wanted):
            found[group].finished[member] = reason
        return found

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

        It took `steps` iterations, in which `drafted` tokens were proposed and verified.
        `accepted`, where it is known: for each token 1 if it was drafted, else 0. Of segments with
        the same start, which grew between two deliveries, the longest stays. One without tokens is
        not stored.
        """
        assert len(tokens) == len(logprobs), f"{trajectory}: {len(tokens)} != {len(logprobs)}"
        assert accepted is None or len(accepted) == len(tokens), f"{trajectory}: {len(accepted)}"
        if not len(tokens):
            return
        made_by = version, instance, steps, drafted
        given = _int32(tokens), struct.pack(f"<{len(logprobs)}f", *logprobs), accepted
        self._put(Statement.SEGMENT, *trajectory, start, *made_by, *given)
        self._pruner.put(len(tokens))

    def put_observed(
        self, trajectory: TrajectoryId, *, start: int, version: Version, tokens: Sequence[int]
    ) -> None:
        """Store the tokens from position `start` on, which an environment answered. They took no
        iteration and have no log-probabilities."""
        blob = _int32(tokens)
        self._put(
            Statement.SEGMENT, *trajectory, start, version, ENVIRONMENT, 0, 0, blob, b"", None
        )
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
        """Store which instance generated how many tokens without the tokens, as if deleted."""
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
        """Store a finished response's weighted sum of rewards, and each by its function's name."""
        values = float(reward), codec.to_json(components)
        self._change("trajectories", trajectory, Statement.REWARD, *values, *trajectory)

    def put_consumed(self, group: GroupId, *, version: Version, members: Sequence[int]) -> None:
        """Store that these members of the group are trained on as part of batch `version`."""
        self.put_ending(group, "consumed", version=version)
        for member in members:
            self._change("trajectories", (group, member), Statement.TRAINED, version, group, member)

    def put_token_details(
        self, trajectory: TrajectoryId, logprobs: bytes | None, flags: bytes
    ) -> None:
        """Store what the learner found and did, token by token (`learner/token_details.py`)."""
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
        """Store what became of a group: it was left out for `reason` when `version` was the newest,
        or it is of the batch `version`, or of an evaluation of that version."""
        self._change("groups", (group,), Statement.ENDING, ending, version, reason, group)
        if group >= 0:
            self._pruner.ended(group, version)

    def prune(self, *, before: Version, history_tokens: int) -> None:
        """Delete tokens that are not needed, some with each commit; see `pruning.py`."""
        self._transaction.write()
        with self._transaction.writing():
            self._pruner.prune(before, history_tokens)

    def commit(self, *, durable: bool = False) -> None:
        """End the transaction: readers see it, and it survives the death of this process; with
        `durable`, which costs a disk flush, also a loss of power. Raises `StorageError` if the disk
        is full, or the file was deleted or damaged."""
        for change in self._changed:
            self._put(Statement.CHANGE, *change)
        self._changed.clear()
        self._transaction.commit(durable_seq=self._last_seq if durable else None)

    def close(self) -> None:
        """Release the file; see `Transaction.close`."""
        self._transaction.close()

    def close_if_missing(self) -> None:
        """See `Transaction.close_if_missing`."""
        self._transaction.close_if_missing()

    def _change(self, table: str, key: tuple[int, ...], statement: Statement, *values: Any) -> None:
        """Put a row for `statement`, which makes or changes the row `key` of a table."""
        self._changed[table, key[0], key[1] if len(key) > 1 else 0] = None
        self._put(statement, *values)

    def _ask(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Rows of a statement, with all that was put."""
        self._transaction.write()
        return self._connection.execute(statement, values).fetchall()

    def _last(self, table: str, column: str = "seq") -> int:
        ((last,),) = self._ask(f"SELECT MAX({column}) FROM {table}")
        return last or 0


def _int32(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)
