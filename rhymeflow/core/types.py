"""The words of the coordinator: identities and small records. It knows no tokens."""

from __future__ import annotations

from typing import Literal, NamedTuple

Version = int
"""Number of the policy's weights; training on batch b makes version b + 1."""

GroupId = int
"""Number of a group: in the order prompts come from the data, from 0; of a suite, from -1 down."""

InstanceId = str
"""Name of a rollout instance, such as `rollout-0`."""

SuiteName = str
"""Name of prompts that versions are evaluated on, and of how."""

HELD_OUT: SuiteName = "held_out"
"""The suite of the run's held-out prompts, each answered once."""

FinishReason = Literal["stop", "length", "max_turns", "finished_early"]
"""`stop`: the policy ended the response, or its environment asked for no more; `length`: it reached
`max_completion_length`; `max_turns`: it had so many turns (`environment.max_turns`);
`finished_early`: it was ended so that its batch need not wait (`on_stuck: truncate`)."""

CUT = ("length", "finished_early")
"""The reasons of a response that is truncated: the policy did not end it. Of one with `max_turns`
it ended the last turn, as in TRL, where such a response has its end-of-sequence token."""

Ending = Literal["filtered", "aborted"]
"""What became of a group that was not consumed. Filtered: complete, but nothing to learn from."""


class EvaluationId(NamedTuple):
    """The evaluation of one version on one suite."""

    version: Version
    suite: SuiteName


class TrajectoryId(NamedTuple):
    """One response: which group, and which member of it (0 .. num_generations - 1)."""

    group: GroupId
    member: int

    def __str__(self) -> str:
        return f"{self.group}.{self.member}"
