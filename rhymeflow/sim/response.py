"""A simulated response: its length, its progress, and the versions of its tokens, for the audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rhymeflow.core.types import TrajectoryId, Version


class Observation(NamedTuple):
    """What an environment returns after a turn."""

    after: int  # tokens that the policy has generated when the turn ends
    tokens: int  # of the observation
    seconds: float  # until it comes


@dataclass(slots=True, eq=False)
class Response:
    """A simulated trajectory; it is multi-turn if it has `observations` of an environment."""

    id: TrajectoryId
    prompt_tokens: int
    sampled_length: int  # tokens that the policy will generate, at least 1
    reward: float = 0.0
    observations: Sequence[Observation] = ()
    draft_classes: Sequence[int] = (0,)  # by turn, see `Drafts.class_of`; others have the last's
    ending: float = 0.0  # seconds from its last token until its environment has ended the episode
    is_complete: bool = False  # finished, or finished early
    turn: int = 0  # turns whose observations have come
    length: int = 0  # tokens, observations included, at which the policy's turn will end
    generated: int = 0
    """Its tokens, observations included; updated only now and then while an instance decodes it."""
    stored: int = 0  # tokens that the trajectory store has
    routed_version: Version | None = None
    """V_traj: the version its instance was to hold when it was first routed."""
    oldest_version: Version | None = None
    """The least version under which one of its tokens was generated; None: it has none."""
    stored_oldest: Version | None = None  # `oldest_version` of the stored tokens
    parts: list[tuple[int, Version]] = field(default_factory=list)
    """(first token, version under which it is generated from there on), in order."""

    def __post_init__(self) -> None:
        self.length = self.observations[0].after if self.observations else self.sampled_length

    def continue_under(self, version: Version) -> None:
        """Record that the next token is generated under `version`."""
        assert self.routed_version is not None
        assert version >= self.routed_version, f"{self.id}: {version} under {self.routed_version}"
        if self.oldest_version is None or version < self.oldest_version:
            self.oldest_version = version
        if not self.parts or self.parts[-1][1] != version:
            self.parts.append((self.generated, version))

    @property
    def sampled(self) -> int:
        """Tokens that the policy generated."""
        return self.generated - sum(each.tokens for each in self.observations[: self.turn])

    @property
    def draft_class(self) -> int:
        """The class of the policy's turn."""
        return self.draft_classes[min(self.turn, len(self.draft_classes) - 1)]

    @property
    def is_last_turn(self) -> bool:
        """Whether the response is complete when the policy's turn ends."""
        return self.turn == len(self.observations)

    def observe(self) -> None:
        """Append the environment's observation and begin the next turn."""
        assert self.generated == self.length
        observation = self.observations[self.turn]
        self.turn += 1
        end = self.sampled_length if self.is_last_turn else self.observations[self.turn].after
        self.generated += observation.tokens
        self.length = self.generated + end - observation.after
        self.store()

    def store(self) -> None:
        """Record that the trajectory store has all its tokens."""
        self.stored, self.stored_oldest = self.generated, self.oldest_version

    def lose(self, length: int) -> None:
        """Go back to the stored tokens: at least `length`, when its instance died."""
        if length > self.stored:
            self.stored, self.stored_oldest = length, self.oldest_version
        self.generated, self.oldest_version = self.stored, self.stored_oldest
        while self.parts and self.parts[-1][0] >= self.stored:
            self.parts.pop()
