"""The seam between a run and where its events and tokens are kept.

One writer, the controller. What it records and puts becomes visible to readers with `commit`; what
a message names (a batch to train on, a published version) is committed before the message is sent,
so that whatever a reader looks for is there. A writer may be in this process (`store/writer.py`),
or hand over at each commit what it was given since the last one to a process or node that keeps it.

Readers open the store on their own: a learner rank its batches, the history index what is new, the
dashboard anything.

Knows nothing of what events mean.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

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


class Progress(NamedTuple):
    """What is stored of a group."""

    row: int
    epoch: int
    prompt: str
    """Messages as JSON."""
    prompt_ids: list[int]
    tokens: dict[int, array[int]]
    """Of each member that there is anything of."""
    finished: dict[int, FinishReason]
    """Members that are complete."""
    versions: dict[int, Version]
    """Of each of these members, the version that generated its last token, as far as one did."""
    turns: dict[int, list[tuple[int, int]]]
    """Of each member that was answered by an environment: for each answer, in order, how many
    tokens there were before it and with it."""


ENVIRONMENT = "environment"
"""Stands for an instance where tokens were not generated: an environment answered them."""


class TrajectoryStore(Protocol):
    """The writer. What is delivered twice is stored once."""

    seconds: float
    """Time spent in here: what storing costs the run."""

    def begin_attempt(self, config: str, *, now: float, started: str) -> int:
        """Begin an attempt at the run, at `started` (date and time); return its number, from 1.

        `now` is seconds since the run began, those between attempts not counted; `config` is the
        attempt's configuration as JSON text.
        """

    def put_config(self, config: str) -> None:
        """Store the attempt's configuration, the values in force, in place of its first one."""

    def forget_groups(self, first: GroupId) -> None:
        """Take out groups from `first` on: their prompts were stored, and no event names them."""

    def record(self, now: float, events: Sequence[Event]) -> int:
        """Append events in this order; return the number of the first.

        `now` is seconds since the run began.
        """

    def record_command(self, event: int, command: Command) -> None:
        """Append what was commanded upon the event of this number."""

    def put_snapshot(self, event: int, state: bytes) -> None:
        """Store the coordinator's state as it is after the event of this number."""

    def prune(self, *, before: Version, history_tokens: int) -> None:
        """Delete, within the next commit, some of the tokens of groups that ended under a version
        less than `before`, until none is left. The last `history_tokens` tokens stay.
        """

    def commit(self, *, durable: bool = False) -> None:
        """Show readers all that came since the last commit; it survives the death of this process.

        `durable`: the loss of power too, and with it all commits before.
        """

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
        """Store a prompt that was requested for a group; of a `suite`, to evaluate `version`."""

    def suite_groups(self) -> tuple[GroupId, dict[GroupId, tuple[SuiteName, Version]]]:
        """The lowest number of a suite's group, and those that have not ended."""

    def origin(self, group: GroupId) -> tuple[int, int]:
        """The row and epoch of a group that was stored."""

    def progress(self, groups: Iterable[GroupId]) -> dict[GroupId, Progress]:
        """How far groups that were stored have come."""

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
        `accepted`, where it is known: for each token 1 if it was drafted, else 0.
        """

    def put_observed(
        self, trajectory: TrajectoryId, *, start: int, version: Version, tokens: Sequence[int]
    ) -> None:
        """Store the tokens from position `start` on, which an environment answered.

        `version`: what generated the token before them.
        """

    def put_finished(self, trajectory: TrajectoryId, *, length: int, reason: FinishReason) -> None:
        """Store that the response is complete with `length` tokens."""

    def put_text(self, trajectory: TrajectoryId, text: str) -> None:
        """Store the text of a finished response."""

    def put_reward(
        self, trajectory: TrajectoryId, *, reward: float, components: Mapping[str, float]
    ) -> None:
        """Store a finished response's weighted sum of rewards, and each by its function's name."""

    def put_consumed(self, group: GroupId, *, version: Version, members: Sequence[int]) -> None:
        """Store that these members of the group are trained on as part of batch `version`."""

    def put_token_details(
        self, trajectory: TrajectoryId, logprobs: bytes | None, flags: bytes
    ) -> None:
        """Store what the learner found and did, token by token (`learner/token_details.py`)."""

    def put_ending(self, group: GroupId, ending: Ending, *, version: Version, reason: str) -> None:
        """Store that the group was left out for `reason` when `version` was the newest."""

    def put_evaluated(self, group: GroupId, version: Version) -> None:
        """Store that an evaluation of `version` is over, of which the group is a part."""
