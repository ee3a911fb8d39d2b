"""Evaluations of versions on suites: which answers are still to come, and how they were judged.

Holds true: the figures are over every answer to every prompt of a suite that could be judged; an
answer counts once, and all of an evaluation are of one version; what comes late from an instance
that is gone counts
nothing. Knows nothing of how answers and rewards come about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rhymeflow.core.types import CUT, HELD_OUT, FinishReason, InstanceId, SuiteName, Version
from rhymeflow.data.prompts import Message, Prompt, opened
from rhymeflow.suites.figures import Judged, figures, said
from rhymeflow.suites.prompts import SuitePrompts
from rhymeflow.workers.messages import Answered, AnswerId, AnswerTurnEnded


class AnswerKey(NamedTuple):
    """Names an answer while it is made and judged; `str` names it for users."""

    instance: InstanceId
    answer: AnswerId

    def __str__(self) -> str:
        asked, suite, row, sample = self.answer
        where = f"(version {asked} on {self.instance})"
        if suite == HELD_OUT:
            return f"the answer to held-out row {row} {where}"
        return f"answer {sample} to row {row} of suite {suite} {where}"


@dataclass(slots=True)
class Answer:
    """An answer, as far as it has come."""

    tokens: list[int]
    """Of one that is not complete, as its environment was told them."""
    turns_ended: int = 0
    turns: list[tuple[int, int]] = field(default_factory=list)
    """Where environments answered; see `InFlight.turns`."""
    reason: FinishReason | None = None
    """Why it is complete; None: it is not."""
    components: dict[str, float] | None = None
    """Rewards that it has by itself, if the rest is up to all answers to its prompt."""


@dataclass
class Evaluation:
    """A suite's prompts being answered on `instance`."""

    suite: SuitePrompts
    version: Version | None = None
    """What they are answered under: what was asked for, or a later one if that was overtaken."""
    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)
    """By row and sample."""
    judged: dict[tuple[int, int], Judged | None] = field(default_factory=dict)
    """None: that cannot be had."""
    error: str | None = None
    """Why not, of the last of these."""

    @property
    def is_complete(self) -> bool:
        """Whether every answer is judged, or never will be."""
        return len(self.judged) == len(self.suite.prompts) * self.suite.suite.n

    def figures(self) -> dict[str, float]:
        """What comes of it, by name."""
        assert self.is_complete
        rows, n = range(len(self.suite.prompts)), self.suite.suite.n
        judged = [[self.judged[row, sample] for sample in range(n)] for row in rows]
        return figures(judged, self.suite.suite.suite.pass_threshold)


class Evaluations:
    """Evaluations in progress, on these suites by name."""

    def __init__(self, suites: Mapping[SuiteName, SuitePrompts]) -> None:
        self.suites = suites
        self.openings: dict[tuple[SuiteName, int], str] = {}
        """Of each row that its environment has opened: what it put after the prompt."""
        self._in_progress: dict[tuple[InstanceId, SuiteName, Version], Evaluation] = {}

    # -- prompts -----------------------------------------------------------------------------

    def open(self, suite: SuiteName, row: int, opening: str) -> None:
        """The environment of a row has put this after its prompt."""
        self.openings[suite, row] = opening
        if opening:
            known = self.suites[suite]
            whole = replace(known.prompts[row], prompt=self.whole_prompt(suite, row))
            known.prompt_ids[row] = known.encoder.encode(whole)

    def prompt(self, key: AnswerKey) -> Prompt:
        """What is answered."""
        return self.suites[key.answer.suite].prompts[key.answer.row]

    def whole_prompt(self, suite: SuiteName, row: int) -> str | list[Message]:
        """A prompt as the policy is given it."""
        prompt = self.suites[suite].prompts[row].prompt
        return opened(prompt, self.openings.get((suite, row), ""))

    # -- answers -----------------------------------------------------------------------------

    def begin(self, instance: InstanceId, suite: SuiteName, asked: Version) -> None:
        """`instance` is to answer a suite's prompts under version `asked`."""
        self._in_progress[instance, suite, asked] = Evaluation(self.suites[suite])

    def answered(self, instance: InstanceId, message: Answered) -> AnswerKey:
        """Receive a complete answer; return its name."""
        key = AnswerKey(instance, message.answer)
        self._take(key, message).reason = message.reason
        return key

    def turn_ended(self, instance: InstanceId, message: AnswerTurnEnded) -> AnswerKey:
        """A turn of an answer is over; return the answer's name."""
        key = AnswerKey(instance, message.answer)
        self._take(key, message).turns_ended = message.turn
        return key

    def _take(self, key: AnswerKey, message: Answered | AnswerTurnEnded) -> Answer:
        evaluation = self.of(key)
        assert evaluation is not None, key
        assert evaluation.version in (None, message.version), "under two versions"
        evaluation.version = message.version
        answer = evaluation.answers.setdefault(_place(key), Answer([]))
        answer.tokens = message.tokens
        return answer

    def observe(self, key: AnswerKey, tokens: list[int]) -> list[int]:
        """An environment answered these tokens; return all that there are of the answer now."""
        answer = self[key]
        before = len(answer.tokens)
        answer.tokens = answer.tokens + tokens  # who was told the old ones may still have them
        answer.turns.append((before, len(answer.tokens)))
        return answer.tokens

    def __getitem__(self, key: AnswerKey) -> Answer:
        """An answer that was heard of, whose instance is there."""
        evaluation = self.of(key)
        assert evaluation is not None, f"{key}: its instance is gone"
        return evaluation.answers[_place(key)]

    def of(self, key: AnswerKey) -> Evaluation | None:
        """The evaluation that an answer is part of; None: its instance is gone, or it is over."""
        return self._in_progress.get((key.instance, key.answer.suite, key.answer.asked))

    def begun(self, instance: InstanceId) -> Iterator[AnswerKey]:
        """The answers that an instance was heard of, and that are not judged."""
        for (name, suite, asked), evaluation in self._in_progress.items():
            if name == instance:
                for place in evaluation.answers.keys() - evaluation.judged.keys():
                    yield AnswerKey(name, AnswerId(asked, suite, *place))

    def judge(self, key: AnswerKey, reward: float, last_turn: str) -> Evaluation:
        """Receive what an answer in progress is worth; `last_turn`: its text.

        Returns the evaluation, which is not in progress any more if that makes it complete.
        """
        evaluation, answer = self.of(key), self[key]
        assert evaluation is not None
        observed = sum(end - start for start, end in answer.turns)
        evaluation.judged[_place(key)] = Judged(
            reward,
            len(answer.tokens) - observed,
            answer.reason in CUT,
            said(last_turn, evaluation.suite.suite.suite.answer_pattern),
        )
        self._end_if_complete(key, evaluation)
        return evaluation

    def fail(self, key: AnswerKey, error: str) -> Evaluation:
        """An answer in progress cannot be had or judged; otherwise like `judge`."""
        evaluation = self.of(key)
        assert evaluation is not None
        evaluation.judged[_place(key)], evaluation.error = None, error
        self._end_if_complete(key, evaluation)
        return evaluation

    def has_failed(self, key: AnswerKey) -> bool:
        """Whether it did that."""
        evaluation, nothing = self.of(key), object()
        return evaluation is not None and evaluation.judged.get(_place(key), nothing) is None

    def _end_if_complete(self, key: AnswerKey, evaluation: Evaluation) -> None:
        if evaluation.is_complete:
            del self._in_progress[key.instance, key.answer.suite, key.answer.asked]

    def leave(self, instance: InstanceId) -> None:
        """An instance is gone, and with it what it was to answer."""
        self._in_progress = {
            key: evaluation for key, evaluation in self._in_progress.items() if key[0] != instance
        }


def _place(key: AnswerKey) -> tuple[int, int]:
    return key.answer.row, key.answer.sample
