"""Types that commands, events and state share: identities and small records."""

from __future__ import annotations

from typing import Literal, NamedTuple

Version = int  # number of the policy's weights; training on batch b makes version b + 1

GroupId = int
"""Number of a group: from 0 in the order of the data; negative, from -1 down, in evaluations."""

InstanceId = str  # name of a rollout instance, such as `rollout-0`

SuiteName = str  # name of an evaluation suite

HELD_OUT: SuiteName = "held_out"  # the suite of the run's held-out prompts, with one response each

FinishReason = Literal["stop", "length", "max_turns", "finished_early"]
"""`stop`: the policy or its environment ended the response; `length`: it reached
`max_completion_length`; `max_turns`: it reached `environment.max_turns`; `finished_early`: it was
truncated so that its batch need not wait (`on_stuck: truncate`)."""

CUT = ("length", "finished_early")
"""The reasons of truncated responses, which the policy did not end. With `max_turns` it ended the
last turn itself: as in TRL, such a response has its end-of-sequence token."""

Ending = Literal["filtered", "aborted"]
"""How a group ended that was not consumed. `filtered`: complete, but without any advantage."""


class EvaluationId(NamedTuple):
    """The evaluation of one version on one suite."""

    version: Version
    suite: SuiteName


class TrajectoryId(NamedTuple):
    """One response: which group, and which member of it, from 0."""

    group: GroupId
    member: int

    def __str__(self) -> str:
        return f"{self.group}.{self.member}"
