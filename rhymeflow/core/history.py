"""How long responses were, and how long those under way will be.

To be written. Until then every response is expected to be of the mean length seen so far.
"""

from __future__ import annotations

from rhymeflow.core.types import GroupId, TrajectoryId


class LengthHistory:
    """Lengths by prompt and by group, and what they foretell.

    Args:
        longest: tokens at which a response ends whatever it says.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._total = self._count = 0

    @property
    def skill(self) -> float:
        """How much of the variance of (log) lengths recent predictions explained, 0 to 1."""
        return 0.0

    def open(self, group: GroupId, prompt: int, epoch: int) -> None:
        """A group of this prompt (row number) was drawn."""

    def finished(self, trajectory: TrajectoryId, length: int) -> None:
        """A response of an open group is complete, and was not cut short."""
        self._total, self._count = self._total + length, self._count + 1

    def rewarded(self, trajectory: TrajectoryId, reward: float) -> None:
        """A finished response of an open group is judged."""

    def close(self, group: GroupId) -> None:
        """The group has ended: no more will be asked about it."""

    def expected(self, group: GroupId, made: int = 0) -> float:
        """Mean tokens, when complete, of a response of this group that has `made` and goes on."""
        mean = self._total / self._count if self._count else self.longest / 4
        return min(max(mean, made + 1.0), float(self.longest))

    def quantile(self, group: GroupId, q: float, made: int = 0) -> float:
        """The q-quantile of the same."""
        return self.expected(group, made)
