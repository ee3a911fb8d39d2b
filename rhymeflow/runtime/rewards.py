"""Rewards: responses and held-out answers go to the reward worker, events come back.

Holds true: a reward is stored before it is reported; one that cannot be had ends the run or, where
the configuration says so, is reported as such, and never becomes a number (law 6); what became of
something that has ended meanwhile is passed over; what a lost worker had not answered is sent to
the one that takes its place. Knows nothing of instances or schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rhymeflow.core.events import Evaluated, Event, RewardFailed, TrajectoryRewarded
from rhymeflow.core.types import FinishReason, InstanceId, TrajectoryId, Version
from rhymeflow.data.prompts import Prompt
from rhymeflow.errors import UserError
from rhymeflow.runtime.evaluation import AnswerKey, Evaluations
from rhymeflow.runtime.in_flight import InFlight
from rhymeflow.store.base import TrajectoryStore
from rhymeflow.workers import messages


class Rewards:
    """Sends complete responses to the reward worker, and makes events of its answers.

    `send` reaches the reward worker. `on_failure` is the configuration's. `evaluated` is called
    with the version and the mean reward of each evaluation that is complete.
    """

    def __init__(
        self,
        send: Callable[[messages.Message], None],
        store: TrajectoryStore,
        in_flight: InFlight,
        evaluations: Evaluations,
        *,
        on_failure: str,
        evaluated: Callable[[Version, float], None],
    ) -> None:
        self._send, self._store = send, store
        self._in_flight, self._evaluations = in_flight, evaluations
        self._on_failure, self._evaluated = on_failure, evaluated
        self._asked: dict[str, tuple[TrajectoryId | AnswerKey, messages.ComputeReward]] = {}
        """What the reward worker has not answered, by the key it was given."""

    def finished(self, trajectory: TrajectoryId, reason: FinishReason) -> int:
        """Store that a response is complete as it is and have it rewarded; return its length."""
        tokens = self._in_flight.complete(trajectory)
        self._store.put_finished(trajectory, length=len(tokens), reason=reason)
        self.ask(trajectory)
        return len(tokens)

    def ask(self, trajectory: TrajectoryId) -> None:
        """Have a complete response rewarded."""
        tokens = self._in_flight.tokens(trajectory)
        self._ask(trajectory, str(trajectory), self._in_flight[trajectory.group].prompt, tokens)

    def answered(self, instance: InstanceId, message: messages.Answered) -> None:
        """Have an answer to a held-out prompt rewarded."""
        key = self._evaluations.answered(instance, message)
        name = f"of evaluation {key.asked} on {instance}, row {key.row}"
        self._ask(key, name, self._evaluations.prompts[message.row], message.tokens)

    def take(self, message: messages.RewardComputed | messages.RewardFailed) -> Iterator[Event]:
        """The event that an answer of the reward worker makes, if it still makes one.

        Raises:
            UserError: a reward cannot be had, and the run is to stop then.
        """
        key, _ = self._asked.pop(message.key)
        failed = isinstance(message, messages.RewardFailed)
        if failed and (self._on_failure == "stop" or isinstance(key, AnswerKey)):
            raise UserError(message.error)
        if isinstance(key, AnswerKey):
            yield from self._answer_rewarded(key, message)
        elif key in self._in_flight:
            self._store.put_text(key, message.text)
            if failed:
                yield RewardFailed(key, message.error)
            else:
                self._store.put_reward(key, reward=message.reward, components=message.components)
                yield TrajectoryRewarded(key, message.reward)

    def ask_again(self) -> None:
        """Another reward worker has taken the place of one that was lost."""
        for _, message in self._asked.values():
            self._send(message)

    def _answer_rewarded(self, key: AnswerKey, message: messages.RewardComputed) -> Iterator[Event]:
        evaluation = self._evaluations.rewarded(key, message.reward)
        if evaluation is None:
            return
        assert evaluation.version is not None
        self._store.put_evaluation(
            evaluation.version,
            key.row,
            tokens=evaluation.answers[key.row],
            text=message.text,
            reward=message.reward,
        )
        if evaluation.is_complete:
            self._evaluated(evaluation.version, evaluation.reward)
            yield Evaluated(key.instance, key.asked, evaluation.reward)

    def _ask(
        self, key: TrajectoryId | AnswerKey, name: str, prompt: Prompt, tokens: list[int]
    ) -> None:
        message = messages.ComputeReward(name, prompt.prompt, tokens, prompt.columns)
        self._asked[name] = key, message
        self._send(message)
