"""An answer to a prompt, while it is made and when it is judged.

Knows nothing of engines, environments or reward functions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, zip_longest

from rhymeflow.core.types import FinishReason


@dataclass(slots=True, eq=False)
class Answer:
    """Sample number `sample` of the answers to prompt `row`."""

    key: str
    """Names it in errors that users see."""
    row: int
    sample: int
    sampled: list[list[int]] = field(default_factory=list)
    """Tokens of the policy's turns that are over."""
    observed: list[list[int]] = field(default_factory=list)
    """Tokens of what was answered to them; to the last turn there may be nothing."""
    num_told: int = 0
    """Of these turns, those that an environment was told: not one that was cut by length."""
    reason: FinishReason | None = None
    """Why it is complete; None: it is not."""
    components: dict[str, float] = field(default_factory=dict)
    """Rewards by the names of what judged it, so far."""
    reward: float | None = None

    @property
    def tokens(self) -> list[int]:
        """All there are, sampled and observed."""
        return list(chain.from_iterable(self.parts))

    @property
    def parts(self) -> list[list[int]]:
        """The same by turns, of which the first and the last are the policy's."""
        nothing: list[int] = []
        turns = list(zip_longest(self.sampled, self.observed, fillvalue=nothing))
        ends_observed = len(self.observed) == len(self.sampled)
        parts = list(chain.from_iterable(turns))
        return [*parts, nothing] if ends_observed else parts[:-1]

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy made."""
        return sum(map(len, self.sampled))
