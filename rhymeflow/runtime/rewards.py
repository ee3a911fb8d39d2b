"""Rewards: responses and held-out answers go to the reward workers, events come back.

Holds true: a reward is stored before it is reported; one that cannot be had ends the run or, where
the configuration says so, is reported as such, and never becomes a number (law 6); what became of
something that has ended meanwhile is passed over. Knows nothing of instances or schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

from rhymeflow.core.events import Evaluated, Event, RewardFailed, TrajectoryRewarded
from rhymeflow.core.types import FinishReason, InstanceId, TrajectoryId, Version
from rhymeflow.data.prompts import Prompt
from rhymeflow.errors import UserError
from rhymeflow.reward.executor import RewardDone, RewardError, RewardExecutor
from rhymeflow.reward.messages import RewardRequest
from rhymeflow.runtime.evaluation import AnswerKey, Evaluations
from rhymeflow.runtime.in_flight import InFlight
from rhymeflow.store.writer import SqliteTrajectoryStore
from rhymeflow.workers.messages import Answered


class RewardDispatcher:
    """Has what is complete judged.

    `text_of` makes text of tokens. `on_failure` is the configuration's. `evaluated` is told the
    version and the mean reward of each evaluation that is complete.
    """

    def __init__(
        self,
        executor: RewardExecutor,
        store: SqliteTrajectoryStore,
        in_flight: InFlight,
        evaluations: Evaluations,
        *,
        text_of: Callable[[list[int]], str],
        on_failure: str,
        evaluated: Callable[[Version, float], None],
    ) -> None:
        self._executor, self._store = executor, store
        self._in_flight, self._evaluations = in_flight, evaluations
        self._text_of, self._on_failure, self._evaluated = text_of, on_failure, evaluated

    def finished(self, trajectory: TrajectoryId, reason: FinishReason) -> int:
        """Store that a response is complete as it is and have it judged; return its length."""
        tokens = self._in_flight.complete(trajectory)
        text = self._text_of(tokens)
        self._store.put_finished(trajectory, length=len(tokens), reason=reason, text=text)
        self._submit(trajectory, self._in_flight[trajectory.group].prompt, text, tokens)
        return len(tokens)

    def answered(self, instance: InstanceId, message: Answered) -> None:
        """Have an answer to a held-out prompt judged."""
        text = self._text_of(message.tokens)
        key = self._evaluations.answered(instance, message, text)
        self._submit(key, self._evaluations.prompts[message.row], text, message.tokens)

    def poll(self, now: float) -> Iterator[Event]:
        """Events from what has been judged by now. Never waits.

        Raises:
            UserError: a reward cannot be had, and the run is to stop then.
        """
        for outcome in self._executor.poll(now):
            key = outcome.key
            if isinstance(outcome, RewardError):
                if self._on_failure == "stop" or not isinstance(key, TrajectoryId):
                    raise UserError(outcome.message)
                if key in self._in_flight:
                    yield RewardFailed(key, outcome.message)
            elif isinstance(key, AnswerKey):
                yield from self._judged_answer(key, outcome)
            elif key in self._in_flight:
                reward, components = outcome.reward, outcome.components
                self._store.put_reward(key, reward=reward, components=components)
                yield TrajectoryRewarded(key, reward)

    def _judged_answer(self, key: AnswerKey, outcome: RewardDone) -> Iterator[Event]:
        evaluation = self._evaluations.judged(key, outcome.reward)
        if evaluation is None:
            return
        version, (tokens, text) = evaluation.version, evaluation.answers[key.row]
        assert version is not None
        self._store.put_evaluation(
            version, key.row, tokens=tokens, text=text, reward=outcome.reward
        )
        if evaluation.is_complete:
            self._evaluated(version, evaluation.reward)
            yield Evaluated(key.instance, key.asked, evaluation.reward)

    def _submit(self, key: Hashable, prompt: Prompt, text: str, tokens: list[int]) -> None:
        self._executor.submit(key, RewardRequest(prompt.prompt, text, tokens, prompt.columns))
