"""Held-out evaluation: which answers are still to come, and their rewards.

Holds true: the mean is over every held-out prompt; an answer counts once; what comes late from an
instance that is gone counts nothing. Knows nothing of how answers and rewards come about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rhymeflow.core.types import InstanceId, Version
from rhymeflow.data.prompts import Message, opened
from rhymeflow.data.run_prompts import RunPrompts
from rhymeflow.workers.messages import Answered, AnswerTurnEnded


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
    turns_ended: dict[int, int] = field(default_factory=dict)
    """Of the answers that have turns, by row."""
    turns: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Of these, where their environments answered; see `InFlight.turns`."""
    answers: dict[int, list[int]] = field(default_factory=dict)
    """Tokens so far, by row; of one that is not complete, as its environment was told them."""
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

    def parts(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """Mean reward of each part of the prompts; `sizes` are the parts, in the rows' order."""
        assert self.is_complete
        found, begin = {}, 0
        for name, size in sizes.items():
            found[name] = sum(self.rewards[row] for row in range(begin, begin + size)) / size
            begin += size
        return found


class Evaluations:
    """Evaluations in progress, of these held-out prompts."""

    def __init__(self, prompts: RunPrompts) -> None:
        self.prompts, self.prompt_ids = prompts.held_out, prompts.held_out_ids
        self._encoder = prompts.encoder
        self.openings: dict[int, str] = {}
        """Of each row that its environment has opened: what it put after the prompt."""
        self._in_progress: dict[tuple[InstanceId, Version], Evaluation] = {}

    def open(self, row: int, opening: str) -> None:
        """The environment of a row has put this after its prompt."""
        self.openings[row] = opening
        if opening:
            whole = replace(self.prompts[row], prompt=self.whole_prompt(row))
            self.prompt_ids[row] = self._encoder.encode(whole)

    def whole_prompt(self, row: int) -> str | list[Message]:
        """The prompt as the policy is given it."""
        return opened(self.prompts[row].prompt, self.openings.get(row, ""))

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

    def turn_ended(self, instance: InstanceId, message: AnswerTurnEnded) -> AnswerKey:
        """A turn of an answer is over; return the name of the answer."""
        evaluation = self._in_progress[instance, message.asked]
        evaluation.version = message.version
        evaluation.turns_ended[message.row] = message.turn
        evaluation.answers[message.row] = message.tokens
        return AnswerKey(instance, message.asked, message.row)

    def turns_ended(self, key: AnswerKey) -> int:
        """How many turns of an answer are over."""
        return self._in_progress[key.instance, key.asked].turns_ended.get(key.row, 0)

    def turns(self, key: AnswerKey) -> list[tuple[int, int]]:
        """Where environments answered in an answer; see `InFlight.turns`."""
        return self._in_progress[key.instance, key.asked].turns.get(key.row, [])

    def observe(self, key: AnswerKey, tokens: list[int]) -> list[int]:
        """An environment answered these tokens; return all that there are of the answer now."""
        evaluation = self._in_progress[key.instance, key.asked]
        before = evaluation.answers[key.row]
        after = evaluation.answers[key.row] = before + tokens
        evaluation.turns.setdefault(key.row, []).append((len(before), len(after)))
        return after

    def answer(self, key: AnswerKey) -> list[int] | None:
        """The tokens of an answer so far; None if its instance is gone."""
        evaluation = self._in_progress.get((key.instance, key.asked))
        return None if evaluation is None else evaluation.answers[key.row]

    def begun(self, instance: InstanceId) -> list[AnswerKey]:
        """The answers that an instance was heard of, and that have no reward."""
        return [
            AnswerKey(instance, evaluation.asked, row)
            for (name, _), evaluation in self._in_progress.items()
            if name == instance
            for row in evaluation.answers
            if row not in evaluation.rewards
        ]

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
