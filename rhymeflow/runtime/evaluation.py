"""Held-out evaluation: which answers are still to come, and their rewards.

Holds true: the mean is over every held-out prompt; an answer counts once; what comes late from an
instance that is gone counts nothing. Knows nothing of how answers and rewards come about.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from rhymeflow.core.types import InstanceId, Version
from rhymeflow.data.prompts import PromptSource
from rhymeflow.workers.messages import Answered


class AnswerKey(NamedTuple):
    """Names an answer to a held-out prompt while it is being rewarded."""

    instance: InstanceId
    asked: Version
    row: int


@dataclass
class Evaluation:
    """Held-out prompts being answered on `instance`."""

    instance: InstanceId
    asked: Version
    size: int
    version: Version | None = None
    """What they were answered under: `asked`, or a later one if that was overtaken."""
    answers: dict[int, list[int]] = field(default_factory=dict)
    """Tokens, by row."""
    rewards: dict[int, float] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether every prompt is answered and rewarded."""
        return len(self.rewards) == self.size

    @property
    def reward(self) -> float:
        """Mean reward."""
        assert self.is_complete
        return sum(self.rewards.values()) / self.size


class Evaluations:
    """Evaluations in progress, of these held-out prompts."""

    def __init__(self, prompts: PromptSource, prompt_ids: list[list[int]]) -> None:
        self.prompts, self.prompt_ids = prompts, prompt_ids
        self._in_progress: dict[tuple[InstanceId, Version], Evaluation] = {}

    def begin(self, instance: InstanceId, asked: Version) -> None:
        """`instance` is to answer under version `asked`."""
        evaluation = Evaluation(instance, asked, len(self.prompts))
        self._in_progress[instance, asked] = evaluation

    def answered(self, instance: InstanceId, message: Answered) -> AnswerKey:
        """Receive an answer; return the name under which its reward is to come."""
        evaluation = self._in_progress[instance, message.asked]
        evaluation.version = message.version
        evaluation.answers[message.row] = message.tokens
        return AnswerKey(instance, message.asked, message.row)

    def rewarded(self, key: AnswerKey, reward: float) -> Evaluation | None:
        """Receive a reward; return the evaluation it is part of, if that is still in progress."""
        evaluation = self._in_progress.get((key.instance, key.asked))
        if evaluation is not None:
            evaluation.rewards[key.row] = reward
            if evaluation.is_complete:
                del self._in_progress[key.instance, key.asked]
        return evaluation

    def leave(self, instance: InstanceId) -> None:
        """An instance is gone, and with it what it was to answer."""
        self._in_progress = {
            key: evaluation for key, evaluation in self._in_progress.items() if key[0] != instance
        }
