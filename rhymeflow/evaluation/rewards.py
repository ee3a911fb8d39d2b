"""The reward functions of a suite, and what they say of its answers.

As in a run, functions that are called per response get each answer alone and as soon as it ends,
those that are called per group all answers to a prompt at once.

Holds true: each answer gets one reward, the weighted sum of what judged it; what cannot be had ends
the evaluation by name, and never becomes a number (law 6). Knows nothing of engines or
environments.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection

from rhymeflow.config import Config
from rhymeflow.data.prompts import Message, Prompt, opened
from rhymeflow.errors import UserError
from rhymeflow.evaluation.answer import Answer
from rhymeflow.reward.calls import RewardTask, reward_pool
from rhymeflow.reward.components import WeightedSum, component_names
from rhymeflow.reward.messages import RewardRequest, TrainerState


class Rewards:
    """Has answers judged, `n` to each prompt; `decode` makes text of tokens, and `seen` of a prompt
    what the policy was given.

    `config` is the suite's, and `name` its name.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        n: int,
        decode: Callable[[list[int]], str],
        seen: Callable[[str | list[Message]], str | list[Message] | None],
    ) -> None:
        functions = config.reward.functions
        self._name, self._n, self._decode = name, n, decode
        self._per_response = _indices(config, "response")
        self._per_group = _indices(config, "group")
        self._sum = WeightedSum(functions, config.environment.classes)
        self._state = TrainerState(0, config.learner.max_steps)
        self._has_turns, self._seen = config.environment.is_used, seen
        self._names = component_names(functions)
        self._executor = reward_pool(config.reward) if functions else None
        self._answers: dict[str, list[Answer]] = {}
        """Those that functions are being called with, by the key of the call."""
        self._groups: dict[int, list[Answer]] = {}
        """Those that are judged alone, by row, while others to the same prompt are not."""
        self._prompts: dict[int, tuple[Prompt, str]] = {}
        self.num_rewarded = 0
        """Answers that have their reward."""

    def start(self) -> None:
        """Start the processes; `UserError` if they cannot import what is configured."""
        if self._executor is not None:
            self._executor.start()

    def close(self) -> None:
        """End the processes."""
        if self._executor is not None:
            self._executor.close()

    def judge(self, answer: Answer, prompt: Prompt, opening: str) -> None:
        """Have a complete answer to a prompt, after which `opening` stood, rewarded."""
        self._prompts[answer.row] = prompt, opening
        if self._per_response:
            self._submit(answer.key, [answer], self._per_response)
        else:
            self._collect(answer)

    def connections(self) -> list[Connection]:
        """See `Pool`."""
        return [] if self._executor is None else self._executor.connections()

    def next_deadline(self) -> float | None:
        """See `Pool`."""
        return None if self._executor is None else self._executor.next_deadline()

    def poll(self, now: float) -> int:
        """Take the rewards that there are, and return of how many calls; never waits.

        Raises:
            UserError: a reward cannot be had.
        """
        outcomes = [] if self._executor is None else self._executor.poll(now)
        for outcome in outcomes:
            if outcome.error is not None:
                raise UserError(outcome.error)
            key = str(outcome.key)
            answers = self._answers.pop(key)
            for answer, components in zip(answers, outcome.result.components, strict=True):
                answer.components |= components
            if len(answers) == 1 and key == answers[0].key:
                self._collect(answers[0])
            else:
                self._reward(answers)
        return len(outcomes)

    def _collect(self, answer: Answer) -> None:
        """All that an answer is judged by alone is known."""
        if not self._per_group:
            self._reward([answer])
            return
        group = self._groups.setdefault(answer.row, [])
        group.append(answer)
        if len(group) == self._n:
            del self._groups[answer.row]
            group.sort(key=lambda each: each.sample)
            key = f"the answers to row {answer.row} of suite {self._name}"
            self._submit(key, group, self._per_group)

    def _reward(self, answers: list[Answer]) -> None:
        for answer in answers:
            answer.reward = self._sum(answer.components)
            if answer.reward is None:
                raise UserError(
                    f"reward functions {', '.join(self._sum.names)}, {answer.key}: all returned "
                    "None: none applies to this sample"
                )
            self.num_rewarded += 1

    def _submit(self, key: str, answers: list[Answer], functions: tuple[int, ...]) -> None:
        assert self._executor is not None
        self._answers[key] = answers
        prompt, opening = self._prompts[answers[0].row]
        whole: str | list[Message] = opened(prompt.prompt, opening)
        tokens = [answer.tokens for answer in answers]
        texts = [self._decode(each) for each in tokens]
        turns = [[self._decode(part) for part in answer.parts] for answer in answers]
        turns = turns if self._has_turns else []
        seen = self._seen(whole)
        request = RewardRequest(whole, texts, tokens, prompt.columns, self._state, turns, seen)
        self._executor.submit(RewardTask(key, request, functions, self._names))


def _indices(config: Config, per: str) -> tuple[int, ...]:
    return tuple(i for i, each in enumerate(config.reward.functions) if each.per == per)
