"""What the learner trains on: a finished trajectory, or one of its sequences. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Sample:
    """A prompt, the response to it, and what the response earned.

    An agent's response may be several sequences, each a sample. They stand together in a batch, and
    have the same reward. Whatever is counted by response counts them as one (`responses`).

    `completion_ids`, `logprobs` and `versions` are equally long; at least one token was sampled.
    Observed tokens, which an environment gave, are in no loss and no statistics."""

    group: int  # number of the group: samples with the same number are compared with each other
    prompt_ids: list[int]
    completion_ids: list[int]
    """Tokens of the response, the stop token included where the policy generated one."""
    logprobs: list[float]
    """The behaviour policy's log-probability of each response token, in nats; 0 if observed."""
    versions: list[int]
    """The version of the weights that sampled each response token, or the last token before an
    observed one."""
    reward: float  # the weighted sum of the reward functions
    truncated: bool  # whether the response was cut (`core.types.CUT`), not ended by the policy
    components: dict[str, float] = field(default_factory=dict)
    """The value of each reward function or environment that applied, by name; empty if there are
    none, and then `reward` is 0."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """The weight of each of them in the reward."""
    observed: list[bool] = field(default_factory=list)
    """Whether each response token is an environment's, or in the loss of an earlier sequence of the
    response; empty if none is."""
    sequence: int = 0  # number of this sequence of the response
    teacher_prompt_ids: list[int] | None = None
    """What a teacher reads in place of the prompt; None: the prompt."""

    def __post_init__(self) -> None:
        length = len(self.completion_ids)
        assert self.prompt_ids, "a sample needs a prompt of at least one token"
        assert length > 0, "a sample needs a response of at least one token"
        assert len(self.logprobs) == length, (len(self.logprobs), length)
        assert len(self.versions) == length, (len(self.versions), length)
        assert len(self.observed) in (0, length), (len(self.observed), length)
        assert not self.observed or not all(self.observed), "nothing of the response was sampled"

    @property
    def num_sampled(self) -> int:
        """Response tokens that the policy sampled."""
        return len(self.completion_ids) - sum(self.observed)

    @property
    def num_turns(self) -> int:
        """Turns of the policy, more than one if there are observations between them."""
        pairs = zip([True, *self.observed], self.observed, strict=False)
        return sum(before and not now for before, now in pairs) or 1

    def sampled(self, values: Sequence[Any] | np.ndarray) -> np.ndarray:
        """Select, from one value per response token, those of the sampled tokens."""
        chosen = np.asarray(values)
        return chosen[~np.asarray(self.observed)] if self.observed else chosen


def owners(batch: Sequence[Sample]) -> np.ndarray:
    """Return the number of each sample's response, in the order of the batch, int64 [N]."""
    begins = np.array([sample.sequence == 0 for sample in batch], dtype=np.int64)
    return np.cumsum(begins) - 1


def first_sequences(batch: Sequence[Sample]) -> list[Sample]:
    """Return the first sequence of each response: what all of them have, it has."""
    return [sample for sample in batch if sample.sequence == 0]


def by_response(batch: Sequence[Sample], values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the sum of the values of each response's samples."""
    return np.bincount(owners(batch), weights=np.asarray(values, dtype=np.float64))
