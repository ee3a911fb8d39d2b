"""Rewards of answers to suites' prompts: they go to the reward worker, and figures come of them.

As for responses, functions that are called per response get each answer alone, and those that are
called per group all answers to a prompt at once. A prompt with one answer is a group by itself, and
all functions get it together.

Holds true: an answer is stored with its reward before its evaluation is reported; a reward that
cannot be had ends the run or, where the suite's `on_failure` is `drop`, is counted and said, and
never becomes a number (law 6); what became of an answer whose instance is gone is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rhymeflow.config import Config
from rhymeflow.core.events import Evaluated
from rhymeflow.core.types import HELD_OUT, SuiteName
from rhymeflow.data.prompts import Message
from rhymeflow.errors import UserError
from rhymeflow.reward.components import WeightedSum
from rhymeflow.runtime.evaluation import AnswerKey, Evaluation, Evaluations
from rhymeflow.store.base import TrajectoryStore
from rhymeflow.suites.sections import functions_of
from rhymeflow.workers import messages


class AnswersKey(NamedTuple):
    """Names all answers to a prompt, by the first of them."""

    first: AnswerKey
    components: tuple[dict[str, float], ...]
    """Rewards that each has by itself."""


Ask = Callable[
    [
        AnswerKey | AnswersKey,
        str,
        tuple[str | list[Message], dict[str, Any]],
        list[list[int]],
        list[list[tuple[int, int]]],
        tuple[int, ...],
    ],
    None,
]
"""Asks the reward worker; see `Rewards`."""


class _Judging(NamedTuple):
    """How a suite's answers are judged: by functions that get one alone, and by those that get all
    answers to a prompt, both by their places in the reward worker."""

    alone: tuple[int, ...]
    together: tuple[int, ...]
    sum: WeightedSum


class AnswerRewards:
    """Has answers judged.

    `ask` reaches the reward worker. `evaluated` is called with the version, suite and figures of
    each evaluation that is complete and, if answers could not be judged, why.
    """

    def __init__(
        self,
        ask: Ask,
        store: TrajectoryStore,
        evaluations: Evaluations,
        config: Config,
        evaluated: Callable[..., None],
    ) -> None:
        self._ask, self._store, self._evaluations = ask, store, evaluations
        self._evaluated = evaluated
        self._judging = {name: _judging(config, name, evaluations) for name in evaluations.suites}

    def ask(self, key: AnswerKey, own: dict[str, float]) -> None:
        """Have a complete answer judged; `own`: what its environment judged."""
        if self._evaluations.of(key) is None:
            return
        alone, together, _ = self._judging[key.answer.suite]
        if alone or not together:
            self._ask_about(key, _name(key), [key], alone)
        else:
            self._collect(key, own)

    def take(
        self,
        key: AnswerKey | AnswersKey,
        message: messages.RewardComputed | messages.RewardFailed,
        own: dict[str, float],
    ) -> Iterator[Evaluated]:
        """The event that an answer of the reward worker makes, if it completes an evaluation.

        Raises:
            UserError: a reward cannot be had.
        """
        first = key.first if isinstance(key, AnswersKey) else key
        if self._evaluations.of(first) is None:
            return
        if isinstance(message, messages.RewardFailed):
            self._may_fail(first, message.error)
            if isinstance(key, AnswersKey):
                yield from self._fail(self._siblings(first), message.error)
            else:
                yield from self.fail([key], message.error)
        elif isinstance(key, AnswersKey):
            keys = self._siblings(first)
            pairs = zip(key.components, message.components, strict=True)
            yield from self._judged(keys, [a | b for a, b in pairs], message)
        elif self._judging[key.answer.suite].together:
            self._collect(key, own | message.components[0])
        else:
            yield from self._judged([key], [own | message.components[0]], message)

    def _collect(self, key: AnswerKey, components: dict[str, float]) -> None:
        """All that an answer is judged by alone is known of it; with its siblings' go on."""
        self._evaluations[key].components = components
        self._judge_together(key)

    def fail(self, keys: Sequence[AnswerKey], error: str) -> Iterator[Evaluated]:
        """These answers to a prompt cannot be had, or not be judged alone: the others go on."""
        yield from self._fail(keys, error)
        for key in keys[-1:]:
            if self._judging[key.answer.suite].together:
                self._judge_together(key)

    def _fail(self, keys: Sequence[AnswerKey], error: str) -> Iterator[Evaluated]:
        for key in keys:
            if self._evaluations.of(key) is not None:
                yield from self._report(key, self._evaluations.fail(key, error))

    def _may_fail(self, key: AnswerKey, error: str) -> None:
        """Raise `UserError` where a reward that cannot be had ends the run."""
        config = self._evaluations.suites[key.answer.suite].suite.config
        if config.reward.on_failure == "stop":
            raise UserError(error)

    def _judge_together(self, key: AnswerKey) -> None:
        """Have answers to a prompt judged together, if the rest of each is known."""
        evaluation, keys = self._evaluations.of(key), self._siblings(key)
        if evaluation is None or not keys:
            return
        known = [evaluation.answers.get((key.answer.row, each.answer.sample)) for each in keys]
        found = [each.components for each in known if each is not None]
        if len(found) == len(keys) and None not in found:
            together = AnswersKey(keys[0], tuple(each or {} for each in found))
            name = _name(key).replace(f"answer {key.answer.sample} to", "the answers to", 1)
            self._ask_about(together, name, keys, self._judging[key.answer.suite].together)

    def _siblings(self, key: AnswerKey) -> list[AnswerKey]:
        """All answers to its prompt that have not failed, in their order."""
        instance, answer = key
        n = self._evaluations.suites[answer.suite].suite.n
        keys = [AnswerKey(instance, answer._replace(sample=sample)) for sample in range(n)]
        return [each for each in keys if not self._evaluations.has_failed(each)]

    def _judged(
        self,
        keys: Sequence[AnswerKey],
        components: Sequence[dict[str, float]],
        message: messages.RewardComputed,
    ) -> Iterator[Evaluated]:
        last_turns = message.last_turns or message.texts
        for key, each, text, last in zip(keys, components, message.texts, last_turns, strict=True):
            answer, total = self._evaluations[key], self._judging[key.answer.suite].sum
            reward = total(each)
            problem = total.problem(message.key, [reward])
            if problem is not None:
                self._may_fail(key, problem)
                yield from self._fail([key], problem)
                continue
            assert reward is not None
            evaluation = self._evaluations.judge(key, reward, last)
            assert evaluation.version is not None
            self._store.put_evaluation(
                evaluation.version,
                key.answer.suite,
                key.answer.row,
                key.answer.sample,
                tokens=answer.tokens,
                text=text,
                reward=reward,
            )
            yield from self._report(key, evaluation)

    def _report(self, key: AnswerKey, evaluation: Evaluation) -> Iterator[Evaluated]:
        """Report the evaluation that an answer was part of, if that makes it complete."""
        if evaluation.is_complete:
            _, suite, *_ = key.answer
            found = evaluation.figures()
            version = key.answer.asked if evaluation.version is None else evaluation.version
            self._evaluated(version, suite, found, *filter(None, [evaluation.error]))
            mean = found.get(f"avg@{evaluation.suite.suite.n}")
            yield Evaluated(key.instance, key.answer.asked, mean, suite, version)

    def _ask_about(
        self,
        key: AnswerKey | AnswersKey,
        name: str,
        keys: Sequence[AnswerKey],
        functions: tuple[int, ...],
    ) -> None:
        answers = [self._evaluations[each] for each in keys]
        about = (
            self._evaluations.whole_prompt(keys[0].answer.suite, keys[0].answer.row),
            self._evaluations.prompt(keys[0]).columns,
        )
        config = self._evaluations.suites[keys[0].answer.suite].suite.config
        turns = [each.turns for each in answers] if config.environment.is_used else []
        tokens = [each.tokens for each in answers]
        self._ask(key, name, about, tokens, turns, functions)


def _judging(config: Config, name: SuiteName, evaluations: Evaluations) -> _Judging:
    suite, places = evaluations.suites[name].suite, tuple(functions_of(config, name))
    functions = suite.config.reward.functions
    total = WeightedSum(functions, suite.config.environment.classes)
    if suite.n == 1:
        return _Judging(places, (), total)
    kinds = list(zip(places, functions, strict=True))
    return _Judging(
        tuple(place for place, each in kinds if each.per == "response"),
        tuple(place for place, each in kinds if each.per == "group"),
        total,
    )


def _name(key: AnswerKey) -> str:
    """What names it where it is judged."""
    if key.answer.suite == HELD_OUT:
        return str(key).replace("the answer to", "the only answer to", 1)
    return str(key)


__all__ = ["AnswerRewards", "AnswersKey"]
