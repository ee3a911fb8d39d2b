"""One simulated response: how long it will be, how far it is, under which versions it was
generated.

Holds true: no token of it was generated under a version below the one it was routed for; what is
stored survives an instance. This is the view from outside the coordinator, by which the staleness
of what is trained on is measured.
"""

from __future__ import annotations

from rhymeflow.core.types import TrajectoryId, Version


class Response:
    """A trajectory as the simulated world has it.

    Args:
        id: which one.
        prompt_tokens: of its prompt.
        length: tokens at which it will end, at least 1.
        known: its prompt was answered in an earlier epoch.
    """

    __slots__ = (
        "generated",
        "id",
        "known",
        "length",
        "oldest_version",
        "prompt_tokens",
        "routed_version",
        "stored",
        "stored_oldest",
    )

    def __init__(
        self, id: TrajectoryId, prompt_tokens: int, length: int, *, known: bool = False
    ) -> None:
        assert length >= 1
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.length = length
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

    def goes_on_under(self, version: Version) -> None:
        """A token of it is generated under `version`."""
        assert self.routed_version is not None
        assert version >= self.routed_version, f"{self.id}: {version} under {self.routed_version}"
        if self.oldest_version is None or version < self.oldest_version:
            self.oldest_version = version

    def store(self) -> None:
        """All that is generated of it is safe."""
        self.stored, self.stored_oldest = self.generated, self.oldest_version

    def lose(self) -> None:
        """Its instance is gone: what was not stored never was."""
        self.generated, self.oldest_version = self.stored, self.stored_oldest
