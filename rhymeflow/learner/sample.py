"""One finished trajectory as the learner sees it.

Holds true: `completion_ids`, `logprobs` and `versions` are equally long and not empty. Knows
nothing of stores, engines or the staleness protocol; imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sample:
    """A prompt, the response to it, and what the response earned."""

    group: int
    """Number of the group: samples with the same number are compared with each other."""
    prompt_ids: list[int]
    """Tokens of the prompt, at least one."""
    completion_ids: list[int]
    """Tokens of the response, the stop token included where the policy generated one."""
    logprobs: list[float]
    """The behaviour policy's log-probability of each response token, in nats."""
    versions: list[int]
    """The version of the weights that generated each response token."""
    reward: float
    """The weighted sum of the reward functions."""
    truncated: bool
    """The policy did not end the response: it was cut, at `max_completion_length` or before."""
    components: dict[str, float] = field(default_factory=dict)
    """What each reward function that applied gave, by its name; for metrics."""

    def __post_init__(self) -> None:
        length = len(self.completion_ids)
        assert self.prompt_ids, "a sample needs a prompt of at least one token"
        assert length > 0, "a sample needs a response of at least one token"
        assert len(self.logprobs) == length, (len(self.logprobs), length)
        assert len(self.versions) == length, (len(self.versions), length)


__all__ = ["Sample"]
