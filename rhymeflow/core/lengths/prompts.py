"""What is remembered of each prompt: how long its responses were, lately most of all.

Holds true: memory per prompt is bounded: decayed sums, and the lengths of its latest epoch. An
epoch counts half as much as the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

KEEP = 0.5


@dataclass(frozen=True, slots=True)
class ByReward:
    """Mean tokens of responses, of the latest epochs mostly; None where there was none."""

    above: float | None
    """Of those with a reward above the mean of their group."""
    others: float | None


@dataclass(slots=True)
class PromptLengths:
    """Lengths of one prompt's responses."""

    epoch: int = 0
    """The latest."""
    responses: int = 0
    """Seen so far, of all epochs."""
    weight: float = 0.0
    """Responses, decayed."""
    logs: float = 0.0
    """Sum of logarithms of lengths, common drift left out, decayed."""
    tokens: float = 0.0
    """Sum of lengths, decayed."""
    latest: list[int] = field(default_factory=list)
    """Lengths of the latest epoch, ascending."""
    _rewarded: list[float] = field(default_factory=lambda: [0.0] * 4)

    @property
    def mean(self) -> float:
        """Mean tokens, the latest epoch counting most."""
        return self.tokens / self.weight

    def quantile(self, q: float) -> float:
        """The q-quantile of the latest epoch's lengths, in tokens."""
        place = min(max(q, 0.0), 1.0) * (len(self.latest) - 1)
        low = min(int(place), max(0, len(self.latest) - 2))
        high = min(low + 1, len(self.latest) - 1)
        return self.latest[low] + (place - low) * (self.latest[high] - self.latest[low])

    def by_reward(self) -> ByReward:
        """Mean lengths of the better responses, and of the others."""
        above, above_tokens, others, other_tokens = self._rewarded
        return ByReward(
            above_tokens / above if above else None, other_tokens / others if others else None
        )

    def add(self, epoch: int, level: float, lengths: Mapping[int, int]) -> None:
        """A group ended; `level` is the mean logarithm of its lengths, drift left out."""
        later = epoch - self.epoch if self.responses else 0
        if later > 0:
            keep = KEEP**later
            self.weight, self.logs, self.tokens = (
                keep * self.weight, keep * self.logs, keep * self.tokens,
            )  # fmt: skip
            self._rewarded = [keep * value for value in self._rewarded]
            self.latest = []
        self.epoch = max(epoch, self.epoch) if self.responses else epoch
        self.responses += len(lengths)
        self.weight += len(lengths)
        self.logs += level * len(lengths)
        self.tokens += sum(lengths.values())
        if later >= 0:
            self.latest = sorted([*self.latest, *lengths.values()])

    def judge(self, lengths: Mapping[int, int], rewards: Mapping[int, float]) -> None:
        """Rewards of a group's members, of the epoch that was added last."""
        if not rewards:
            return
        mean = sum(rewards.values()) / len(rewards)
        for member, reward in rewards.items():
            place = 0 if reward > mean else 2
            self._rewarded[place] += 1
            self._rewarded[place + 1] += lengths[member]
