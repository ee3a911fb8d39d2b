"""What became of every group and response, outside the coordinator: the laws are checked on it.

A run whose audit closes has kept laws 1 and 2: no batch held a token older than the bound allows,
and every group that was admitted ended, once. It rests on what instances did (the version they held
when they generated a token), not on the coordinator's state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rhymeflow.core.commands import Accumulate, Drop, Train
from rhymeflow.core.spread import is_flat
from rhymeflow.core.types import GroupId, TrajectoryId, Version
from rhymeflow.sim.response import Response
from rhymeflow.sim.workload import Prompt

NOT_NEEDED = "its group did not need it"
"""Why a member of a consumed group was not trained on: there were more than `num_generations`."""


class InvariantViolation(AssertionError):  # noqa: N818 - it is what happened
    """The run did what it must never do. A defect of the coordinator, or of the simulator."""


class Outcome(NamedTuple):
    """How one response ended."""

    length: int  # as long as it would have become
    ending: str  # `consumed`, `filtered` or `aborted`
    reason: str


class Tokens(NamedTuple):
    """Of prompts and responses, what the learner has to do with them."""

    moving: int
    still: int
    """Of groups whose trained responses have all the same reward: they are only measured."""


class Batch(NamedTuple):
    """What one step trained on."""

    version: Version
    responses: int
    response_tokens: int  # answers of environments included
    sampled_tokens: int  # without them
    prompt_tokens: int
    still_tokens: int
    """Of both, those of groups whose trained responses have all the same reward."""

    @property
    def tokens(self) -> Tokens:
        """All of them."""
        return Tokens(
            self.prompt_tokens + self.response_tokens - self.still_tokens, self.still_tokens
        )


class Step(NamedTuple):
    """The state of the run when a version was published."""

    version: Version
    time: float
    rollout_busy: float
    """Seconds in which instances did anything, all of them together, since the beginning."""
    learner_busy: float


class Audit:
    """The record of one simulated run."""

    def __init__(self, *, num_generations: int, groups_per_batch: int, max_staleness: int) -> None:
        self.responses: dict[TrajectoryId, Response] = {}  # all that were ever routed
        self.outcomes: list[Outcome] = []
        self.batches: list[Batch] = []
        self.staleness: Counter[int] = Counter()
        """Trained responses by the age of their oldest token, in versions."""
        self._num_generations, self._groups_per_batch = num_generations, groups_per_batch
        self._max_staleness = max_staleness
        self._prompts: dict[GroupId, Prompt] = {}
        self._members: dict[GroupId, list[Response]] = {}
        """Those of groups that were admitted and have not ended."""
        self._complete: set[TrajectoryId] = set()
        self._rewards: dict[TrajectoryId, float] = {}
        self._ended: set[GroupId] = set()

    def request(self, group: GroupId, prompt: Prompt) -> None:
        """A prompt was requested from the data, as this group."""
        assert group not in self._prompts
        self._prompts[group] = prompt

    def prompt(self, group: GroupId) -> Prompt:
        """What the group's prompt is."""
        return self._prompts[group]

    def admit(self, response: Response) -> None:
        """A response is routed for the first time."""
        if response.id.group in self._ended:
            raise InvariantViolation(f"{response.id} is begun, but its group has ended")
        self.responses[response.id] = response
        self._members.setdefault(response.id.group, []).append(response)

    def complete(self, trajectory: TrajectoryId) -> None:
        """A response is finished, or concluded."""
        if trajectory in self._complete:
            raise InvariantViolation(f"{trajectory} was completed twice")
        self._complete.add(trajectory)

    def is_open(self, trajectory: TrajectoryId) -> bool:
        """Whether it can still go on."""
        return trajectory.group not in self._ended and trajectory not in self._complete

    def reward(self, trajectory: TrajectoryId, reward: float) -> None:
        """A complete response has its reward."""
        self._rewards[trajectory] = reward

    def train(self, command: Train) -> Batch:
        """Check the batch, and enter it."""
        members = list(zip(command.groups, command.members, strict=True))
        trained = [
            [self._trained(command.version, TrajectoryId(group, member)) for member in chosen]
            for group, chosen in members
        ]
        number, sizes = command.version, {len(set(chosen)) for chosen in command.members}
        if number != len(self.batches):
            raise InvariantViolation(f"batch {number} follows batch {len(self.batches) - 1}")
        if len(command.groups) != self._groups_per_batch or sizes != {self._num_generations}:
            raise InvariantViolation(f"batch {number} is not of the size that was asked for")
        for group, chosen in members:
            for response in self._end(group):
                used = response.id.member in chosen
                self._enter(response, "consumed" if used else "aborted", "" if used else NOT_NEEDED)
        every = [response for group in trained for response in group]
        batch = Batch(
            version=number,
            responses=len(every),
            response_tokens=sum(response.generated for response in every),
            sampled_tokens=sum(response.sampled for response in every),
            prompt_tokens=sum(response.prompt_tokens for response in every),
            still_tokens=self._still(trained),
        )
        self.batches.append(batch)
        return batch

    def tokens(self, command: Accumulate) -> Tokens:
        """Of groups that are complete, and stay so."""
        groups = [
            [self.responses[TrajectoryId(group, member)] for member in members]
            for group, members in zip(command.groups, command.members, strict=True)
        ]
        if command.version != len(self.batches) or not all(
            response.id in self._rewards and response.id.group not in self._ended
            for group in groups
            for response in group
        ):
            raise InvariantViolation(f"{command} is of no batch, or of what is not complete")
        still = self._still(groups)
        return Tokens(sum(_tokens(each) for group in groups for each in group) - still, still)

    def _still(self, groups: Iterable[Sequence[Response]]) -> int:
        return sum(
            _tokens(response)
            for group in groups
            if is_flat([self._rewards[response.id] for response in group])
            for response in group
        )

    def drop(self, command: Drop) -> None:
        """A group ended without being trained on."""
        for response in self._end(command.group):
            self._enter(response, command.ending, command.reason)

    def close(self, num_batches: int) -> None:
        """The run is over: every group that was admitted has ended."""
        if self._members:
            raise InvariantViolation(
                f"groups {sorted(self._members)[:10]} were admitted and did not end"
            )
        if len(self.batches) != num_batches:
            raise InvariantViolation(
                f"{len(self.batches)} of {num_batches} batches were trained on"
            )

    def _trained(self, version: Version, trajectory: TrajectoryId) -> Response:
        if trajectory not in self._complete:
            raise InvariantViolation(f"{trajectory} is trained on and is not complete")
        response = self.responses[trajectory]
        assert response.oldest_version is not None
        age = version - response.oldest_version
        if not 0 <= age <= self._max_staleness:
            raise InvariantViolation(
                f"{trajectory} is {age} versions old in batch {version}; "
                f"the bound is {self._max_staleness}"
            )
        self.staleness[age] += 1
        return response

    def _end(self, group: GroupId) -> list[Response]:
        if group in self._ended:
            raise InvariantViolation(f"group {group} ended twice")
        self._ended.add(group)
        return self._members.pop(group, [])

    def _enter(self, response: Response, ending: str, reason: str) -> None:
        self.outcomes.append(Outcome(response.sampled_length, ending, reason))


def _tokens(response: Response) -> int:
    return response.prompt_tokens + response.generated
