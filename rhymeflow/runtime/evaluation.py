"""One evaluation under way: which held-out answers are still to come, and their rewards.

Holds true: the mean is over every held-out prompt; an answer counts once. Knows nothing of
instances or of how rewards are made.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rhymeflow.core.types import InstanceId, Version


@dataclass
class Evaluation:
    """Held-out prompts being answered on `instance`."""

    instance: InstanceId
    asked: Version
    size: int
    version: Version | None = None
    """What they were answered under: `asked`, or a later one if that was overtaken."""
    texts: dict[int, str] = field(default_factory=dict)
    rewards: dict[int, float] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether every prompt is answered and judged."""
        return len(self.rewards) == self.size

    @property
    def reward(self) -> float:
        """Mean reward."""
        assert self.is_complete
        return sum(self.rewards.values()) / self.size
