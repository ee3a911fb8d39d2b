"""Rewards: responses and held-out answers go to the reward worker, events come back.

Functions that are called per response get each one as it ends. Those that are called per group get
the first `num_generations` members of it for which that was done, in one call: with their rewards
the group is complete, so these are the members that are trained on, and what ends later is surplus.
If that call fails, so has each of its members; where the coordinator lets the group go on with as
many spare ones, these are judged in their place. What is made of answers to suites' prompts is up
to `answer_rewards.py`.

Holds true: the rewards of a group call are reported together, or none is; a reward is stored before
it is reported; one that cannot be had ends the run or, where the configuration says so, is reported
as such, and never becomes a number (law 6); what became of something that has ended meanwhile is
passed over; what a lost worker had not answered is sent to the one that takes its place. Knows
nothing of instances or schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from rhymeflow.config import Config
from rhymeflow.core.events import Event, RewardFailed, TrajectoryRewarded
from rhymeflow.core.types import (
    FinishReason,
    GroupId,
    InstanceId,
    TrajectoryId,
    Version,
)
from rhymeflow.data.prompts import Message
from rhymeflow.errors import UserError
from rhymeflow.reward.components import WeightedSum
from rhymeflow.reward.messages import TrainerState
from rhymeflow.runtime.answer_rewards import AnswerRewards, AnswersKey
from rhymeflow.runtime.evaluation import AnswerKey, Evaluations
from rhymeflow.runtime.in_flight import InFlight
from rhymeflow.store.base import TrajectoryStore
from rhymeflow.utils.consecutive_failures import ConsecutiveFailures
from rhymeflow.workers import messages

Answer = messages.RewardComputed | messages.RewardFailed


class Members(NamedTuple):
    """Members of a group that are judged together, and the rewards that each has by itself."""

    group: GroupId
    members: tuple[int, ...]
    components: tuple[dict[str, float], ...]


class Rewards:
    """Sends complete responses to the reward worker, and makes events of its answers.

    `send` reaches the reward worker. `published_version` says which version is published.
    `evaluated` is called with the version, suite and figures of each evaluation that is complete;
    `log` with each answer, and the prefix of metrics in it.
    """

    def __init__(
        self,
        send: Callable[[messages.Message], None],
        store: TrajectoryStore,
        in_flight: InFlight,
        evaluations: Evaluations,
        config: Config,
        *,
        published_version: Callable[[], Version],
        evaluated: Callable[..., None],
        log: Callable[[messages.RewardComputed, str], None],
    ) -> None:
        self._send, self._store = send, store
        self._in_flight, self._evaluations = in_flight, evaluations
        self._on_failure, self._log = config.reward.on_failure, log
        self._answers = AnswerRewards(self._ask, store, evaluations, config, evaluated)
        self._failures = ConsecutiveFailures(
            config.reward.max_consecutive_failures, "reward.max_consecutive_failures"
        )
        self._num_generations = config.rollout.num_generations
        self._max_steps, self._published_version = config.learner.max_steps, published_version
        functions = config.reward.functions
        self._all = tuple(range(len(functions)))
        self._per_group = tuple(i for i in self._all if functions[i].per == "group")
        self._per_response = tuple(i for i in self._all if functions[i].per == "response")
        self._sum = WeightedSum(functions, config.environment.classes)
        aggregation = config.learner.multi_objective_aggregation
        self._compares_components = aggregation == "normalize_then_sum"
        self._judge_episode: Callable[[TrajectoryId | AnswerKey], None]
        self._judges_episodes = bool(config.environment.classes)
        self._has_turns = config.environment.is_used
        self._from_environment: dict[TrajectoryId | AnswerKey, dict[str, float]] = {}
        """Of responses that functions are being called for: the reward of their environment."""
        self._asked: dict[
            str, tuple[TrajectoryId | Members | AnswerKey | AnswersKey, messages.ComputeReward]
        ] = {}
        """What the reward worker has not answered, by the key it was given."""

    def finished(self, trajectory: TrajectoryId, reason: FinishReason) -> int:
        """Store that a response is complete as it is and have it rewarded; return its length."""
        tokens = self._in_flight.complete(trajectory)
        self._store.put_finished(trajectory, length=len(tokens), reason=reason)
        self.ask(trajectory)
        return len(tokens)

    def judge_episodes_with(self, judge: Callable[[TrajectoryId | AnswerKey], None]) -> None:
        """From now on `judge` is called with each complete response or answer whose environment
        judges it, and leads to `judged`, or to an event that says why not. Then come the reward
        functions.
        """
        self._judge_episode = judge

    def judged(self, subject: TrajectoryId | AnswerKey, components: dict[str, float]) -> None:
        """Its environment has judged a response; see `judge_episodes_with`."""
        self._from_environment[subject] = components
        if isinstance(subject, AnswerKey):
            self._answers.ask(subject, components)
        else:
            self._ask_functions(subject)

    def ask(self, trajectory: TrajectoryId) -> None:
        """Have a response that is stored as complete rewarded."""
        if self._judges_episodes:
            self._judge_episode(trajectory)
        else:
            self._ask_functions(trajectory)

    def _ask_functions(self, trajectory: TrajectoryId) -> None:
        # Without functions the reward worker still makes text of the response.
        if self._per_response or not self._per_group:
            tokens = self._in_flight.tokens(trajectory)
            group = self._in_flight[trajectory.group]
            about = group.whole_prompt, group.prompt.columns
            turns = self._turns([trajectory])
            name = f"trajectory {trajectory}"
            self._ask(trajectory, name, about, [tokens], turns, self._per_response)
        else:
            self._collect(trajectory, self._from_environment.pop(trajectory, {}))

    def answered(self, instance: InstanceId, message: messages.Answered) -> None:
        """Have an answer to a suite's prompt rewarded."""
        self.answer_complete(self._evaluations.answered(instance, message))

    def answers_failed(self, keys: Sequence[AnswerKey], error: str) -> Iterator[Event]:
        """Environments of these answers failed."""
        yield from self._answers.fail(keys, error)

    def answer_complete(self, key: AnswerKey) -> None:
        """The same of one whose last turn an environment had the last word on."""
        suite = self._evaluations.suites[key.answer.suite].suite
        if suite.config.environment.classes:
            self._judge_episode(key)
        else:
            self._answers.ask(key, {})

    def take(self, message: Answer) -> Iterator[Event]:
        """The events that an answer of the reward worker makes, if it still makes any.

        Raises:
            UserError: a reward cannot be had, and the run is to stop then; or too many in a row.
        """
        key, _ = self._asked.pop(message.key)
        self._failures.count(message.error if isinstance(message, messages.RewardFailed) else None)
        is_answer = isinstance(key, AnswerKey | AnswersKey)
        if isinstance(message, messages.RewardComputed):
            self._log(message, "eval/" if is_answer else "")
        is_one = isinstance(key, TrajectoryId | AnswerKey)
        own = self._from_environment.pop(key, {}) if is_one else {}
        if isinstance(key, AnswerKey | AnswersKey):
            yield from self._answers.take(key, message, own)
        elif isinstance(key, Members):
            yield from self._group_judged(key, message)
        elif key in self._in_flight:
            self._store.put_text(key, message.texts[0])
            if isinstance(message, messages.RewardFailed):
                yield self._failed(key, message.error)
            elif self._per_group:
                self._collect(key, own | message.components[0])
            else:
                yield from self._rewarded(message.key, [key], [own | message.components[0]])

    def ask_again(self) -> None:
        """Another reward worker has taken the place of one that was lost."""
        for _, message in self._asked.values():
            self._send(message)

    # -- groups ------------------------------------------------------------------------------

    def _collect(self, trajectory: TrajectoryId, components: dict[str, float]) -> None:
        """All that a response is judged by alone is known of it; the rest is up to its group."""
        self._in_flight[trajectory.group].to_judge[trajectory.member] = components
        self._judge(trajectory.group)

    def _judge(self, group_id: GroupId) -> None:
        """Have a group's functions called, once there are as many members as are trained on."""
        group = self._in_flight[group_id]
        if group.is_judged or len(group.to_judge) < self._num_generations:
            return
        group.is_judged = True
        members = sorted(islice(group.to_judge, self._num_generations))
        key = Members(group_id, tuple(members), tuple(map(group.to_judge.pop, members)))
        trajectories = [TrajectoryId(group_id, member) for member in members]
        tokens = [self._in_flight.tokens(each) for each in trajectories]
        turns = self._turns(trajectories)
        about = group.whole_prompt, group.prompt.columns
        self._ask(key, f"group {group_id}", about, tokens, turns, self._per_group)

    def _turns(self, trajectories: list[TrajectoryId]) -> list[list[tuple[int, int]]]:
        if not self._has_turns:
            return []
        return [self._in_flight.turns(each) for each in trajectories]

    def _group_judged(self, key: Members, message: Answer) -> Iterator[Event]:
        trajectories = [TrajectoryId(key.group, member) for member in key.members]
        if trajectories[0] not in self._in_flight:
            return
        for trajectory, text in zip(trajectories, message.texts, strict=True):
            self._store.put_text(trajectory, text)
        if isinstance(message, messages.RewardComputed):
            pairs = zip(key.components, message.components, strict=True)
            components = [alone | together for alone, together in pairs]
            yield from self._rewarded(message.key, trajectories, components)
        else:
            for trajectory in trajectories:
                yield self._failed(trajectory, message.error)
            self._in_flight[key.group].is_judged = False
            self._judge(key.group)

    # -- rewards -----------------------------------------------------------------------------

    def _rewarded(
        self,
        name: str,
        trajectories: list[TrajectoryId],
        components: Sequence[dict[str, float]],
    ) -> Iterator[Event]:
        """Report a reward for each, or for all of them that there is none."""
        rewards = [self._sum(each) for each in components]
        problem = self._sum.problem(name, rewards)
        for trajectory, each, reward in zip(trajectories, components, rewards, strict=True):
            if problem is not None:
                yield self._failed(trajectory, problem)
            else:
                assert reward is not None
                ordered = self._sum.ordered(each)
                self._store.put_reward(trajectory, reward=reward, components=ordered)
                yield TrajectoryRewarded(trajectory, reward, self._compared(ordered))

    def _compared(self, components: dict[str, float]) -> dict[str, tuple[float, float]] | None:
        """Weight and value of each, if they are compared one by one in their group."""
        if not self._compares_components:
            return None
        return {name: (self._sum.weights[name], value) for name, value in components.items()}

    def _failed(self, trajectory: TrajectoryId, error: str) -> RewardFailed:
        if self._on_failure == "stop":
            raise UserError(error)
        return RewardFailed(trajectory, error)

    def _ask(
        self,
        key: TrajectoryId | Members | AnswerKey | AnswersKey,
        name: str,
        about: tuple[str | list[Message], dict[str, Any]],
        responses: list[list[int]],
        turns: list[list[tuple[int, int]]],
        functions: tuple[int, ...],
    ) -> None:
        prompt, columns = about
        state = TrainerState(self._published_version(), self._max_steps)
        message = messages.ComputeReward(name, prompt, responses, columns, functions, state, turns)
        self._asked[name] = key, message
        self._send(message)
