"""One simulated response: how long it will be, how far it is, under which versions it was
generated.

Holds true: no token of it was generated under a version below the one it was routed for; what is
stored survives an instance. This is the view from outside the coordinator, by which the staleness
of what is trained on is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rhymeflow.core.types import TrajectoryId, Version


class Answer(NamedTuple):
    """What an environment will say to a turn."""

    after: int
    """Tokens that the policy has generated when the turn ends."""
    tokens: int
    """Of the answer."""
    seconds: float
    """Until it comes."""


class Response:
    """A trajectory as the simulated world has it.

    Args:
        id: which one.
        prompt_tokens: of its prompt.
        length: tokens that the policy will generate, at least 1.
        known: its prompt was answered in an earlier epoch.
        answers: of its environment, in order; none: it has no turns.
    """

    __slots__ = (
        "answers",
        "generated",
        "id",
        "known",
        "length",
        "oldest_version",
        "parts",
        "prompt_tokens",
        "routed_version",
        "sampled_length",
        "stored",
        "stored_oldest",
        "turn",
    )

    def __init__(
        self,
        id: TrajectoryId,
        prompt_tokens: int,
        length: int,
        *,
        known: bool = False,
        answers: Sequence[Answer] = (),
    ) -> None:
        assert length >= 1
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.sampled_length = length
        self.answers = answers
        self.turn = 0
        """Turns that the environment has answered."""
        self.length = answers[0].after if answers else length
        """Tokens, those of answers included, at which the policy's turn will end."""
        self.known = known
        self.generated = 0
        """Tokens of it; while an instance decodes it, as of when it was last looked at."""
        self.stored = 0
        """Tokens that the trajectory store has."""
        self.routed_version: Version | None = None
        """V_traj: the version its instance was to hold when it was first routed."""
        self.oldest_version: Version | None = None
        """The least version a token of it was generated under; None: it has none."""
        self.stored_oldest: Version | None = None
        """The same of what is stored."""
        self.parts: list[tuple[int, Version]] = []
        """From which token on it was generated under which version, in order."""

    def goes_on_under(self, version: Version) -> None:
        """A token of it is generated under `version`."""
        assert self.routed_version is not None
        assert version >= self.routed_version, f"{self.id}: {version} under {self.routed_version}"
        if self.oldest_version is None or version < self.oldest_version:
            self.oldest_version = version
        if not self.parts or self.parts[-1][1] != version:
            self.parts.append((self.generated, version))

    @property
    def sampled(self) -> int:
        """Tokens of it that the policy generated."""
        return self.generated - sum(answer.tokens for answer in self.answers[: self.turn])

    @property
    def is_last_turn(self) -> bool:
        """Whether it is complete when the policy's turn ends."""
        return self.turn == len(self.answers)

    def observe(self) -> None:
        """The environment has answered, and the next turn comes."""
        assert self.generated == self.length
        answer = self.answers[self.turn]
        self.turn += 1
        end = self.sampled_length if self.is_last_turn else self.answers[self.turn].after
        self.generated += answer.tokens
        self.length = self.generated + end - answer.after
        self.store()

    def store(self) -> None:
        """All that is generated of it is safe."""
        self.stored, self.stored_oldest = self.generated, self.oldest_version

    def lose(self) -> None:
        """Its instance is gone: what was not stored never was."""
        self.generated, self.oldest_version = self.stored, self.stored_oldest
        while self.parts and self.parts[-1][0] >= self.stored:
            self.parts.pop()
