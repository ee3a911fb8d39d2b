"""Checks laws 1 and 2 on a simulated run, from the instances' record, not the coordinator's state.

If `Audit.close` returns, the run kept both: by the versions that instances held, no batch had a
token older than the bound allows, and every admitted group ended once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rhymeflow.core.commands import Accumulate, Drop, Train
from rhymeflow.core.plan import Plan
from rhymeflow.core.spread import is_flat
from rhymeflow.core.types import GroupId, TrajectoryId, Version
from rhymeflow.sim.response import Response
from rhymeflow.sim.workload import SimulatedPrompt

NOT_NEEDED = "its group did not need it"
"""The reason of a consumed group's members beyond `num_generations`, which are not trained on."""


class InvariantViolation(AssertionError):  # noqa: N818 - a broken law, not a failed call
    """The run broke a law: a defect of the coordinator or of the simulator."""


class Outcome(NamedTuple):
    """How one response ended."""

    length: int  # tokens of the whole response, had it not been stopped
    ending: str  # `consumed`, `filtered` or `aborted`
    reason: str


class Tokens(NamedTuple):
    """Tokens by what the learner computes for them: a group's prompt once, responses in full."""

    trained: int  # forward and backward pass
    measured: int  # forward pass only: of groups whose trained responses all have the same reward


class TrainedBatch(NamedTuple):
    """The size of one step's batch."""

    responses: int
    response_tokens: int  # observations included
    sampled_tokens: int  # observations excluded
    total_tokens: int  # of responses, each with its prompt
    tokens: Tokens


class PublishedStep(NamedTuple):
    """The state of the run when a version was published."""

    version: Version
    time: float
    rollout_busy: float
    """Seconds since the beginning in which instances were busy, summed over instances."""
    learner_busy: float  # seconds


@dataclass(slots=True)
class RequestedGroup:
    """A prompt that was requested from the data, and its responses."""

    prompt: SimulatedPrompt
    members: list[Response] = field(default_factory=list)
    """In the order in which they were first routed."""
    has_ended: bool = False


class Audit:
    """The record of one simulated run."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.groups: list[RequestedGroup] = []  # by their numbers
        self.responses: dict[TrajectoryId, Response] = {}  # all that were ever routed
        self.outcomes: list[Outcome] = []
        self.batches: list[TrainedBatch] = []
        self.staleness: Counter[int] = Counter()
        """Trained responses by the age of their oldest token, in versions."""

    def admit(self, response: Response) -> None:
        """Record a response that is routed for the first time."""
        group = self.groups[response.id.group]
        if group.has_ended:
            raise InvariantViolation(f"{response.id} is begun, but its group has ended")
        self.responses[response.id] = response
        group.members.append(response)

    def complete(self, trajectory: TrajectoryId) -> Response:
        """Record that a response has finished or was finished early, and return it."""
        response = self.responses[trajectory]
        if response.is_complete:
            raise InvariantViolation(f"{trajectory} was completed twice")
        response.is_complete = True
        return response

    def is_open(self, response: Response) -> bool:
        """Whether more tokens of the response may be generated."""
        return not (response.is_complete or self.groups[response.id.group].has_ended)

    def train(self, command: Train) -> TrainedBatch:
        """Check and record a trained batch."""
        number = command.version
        groups = self._chosen(command)
        trained = [response for group in groups for response in group]
        for response in trained:
            self._check_trained(number, response)
        if number != len(self.batches):
            raise InvariantViolation(f"batch {number} follows batch {len(self.batches) - 1}")
        sizes = {len(set(chosen)) for chosen in command.members}
        if len(groups) != self.plan.groups_per_batch or sizes != {self.plan.num_generations}:
            raise InvariantViolation(f"batch {number} is not of the size that was asked for")
        for group, chosen in zip(command.groups, command.members, strict=True):
            for response in self._end(group):
                used = response.id.member in chosen
                self._note(response, "consumed" if used else "aborted", "" if used else NOT_NEEDED)
        batch = TrainedBatch(
            responses=len(trained),
            response_tokens=sum(response.generated for response in trained),
            sampled_tokens=sum(response.sampled for response in trained),
            total_tokens=sum(response.prompt_tokens + response.generated for response in trained),
            tokens=_tokens(groups),
        )
        self.batches.append(batch)
        return batch

    def tokens(self, command: Accumulate) -> Tokens:
        """Count the tokens of complete groups of the next batch, which are trained on early."""
        groups = self._chosen(command)
        if command.version != len(self.batches) or not all(
            response.is_complete and not self.groups[response.id.group].has_ended
            for group in groups
            for response in group
        ):
            raise InvariantViolation(f"{command}: wrong batch, or an incomplete response")
        return _tokens(groups)

    def drop(self, command: Drop) -> None:
        """Record a group that ended without being trained on."""
        for response in self._end(command.group):
            self._note(response, command.ending, command.reason)

    def close(self) -> None:
        """Check at the end of the run that every admitted group and every batch has ended."""
        left = [n for n, each in enumerate(self.groups) if each.members and not each.has_ended]
        if left:
            raise InvariantViolation(f"groups {left[:10]} were admitted and did not end")
        if len(self.batches) != (wanted := self.plan.num_batches):
            raise InvariantViolation(f"{len(self.batches)} of {wanted} batches were trained on")

    def _chosen(self, command: Train | Accumulate) -> list[list[Response]]:
        return [
            [self.responses[TrajectoryId(group, member)] for member in chosen]
            for group, chosen in zip(command.groups, command.members, strict=True)
        ]

    def _check_trained(self, version: Version, response: Response) -> None:
        if not response.is_complete:
            raise InvariantViolation(f"{response.id} is trained on and is not complete")
        assert response.oldest_version is not None
        age, bound = version - response.oldest_version, self.plan.max_staleness
        if not 0 <= age <= bound:
            raise InvariantViolation(
                f"{response.id} is {age} versions old in batch {version}; the bound is {bound}"
            )
        self.staleness[age] += 1

    def _end(self, number: GroupId) -> list[Response]:
        group = self.groups[number]
        if group.has_ended:
            raise InvariantViolation(f"group {number} ended twice")
        group.has_ended = True
        return group.members

    def _note(self, response: Response, ending: str, reason: str) -> None:
        self.outcomes.append(Outcome(response.sampled_length, ending, reason))


def _tokens(groups: Iterable[Sequence[Response]]) -> Tokens:
    trained = measured = 0
    for group in groups:
        tokens = group[0].prompt_tokens + sum(response.generated for response in group)
        if is_flat([response.reward for response in group]):
            measured += tokens
        else:
            trained += tokens
    return Tokens(trained, measured)
