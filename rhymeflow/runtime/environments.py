"""Environments: turns of the policy go to the environment worker, and what it answers comes back.

The worker is sent the whole episode each time, and brings an environment to where it is if it has
none that is; so nothing is lost with a worker, nor with this process. What answers held-out prompts
has turns too: it is kept here, and sent on to the instance that answers.

Holds true: an answer is stored before it is reported; one that cannot be had ends the run or, where
the configuration says so, is reported as such, and never becomes a number (law 6); what came of
something that has ended meanwhile is passed over; what a lost worker had not answered is asked of
the one that takes its place. Knows nothing of schedules, nor of what environments are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rhymeflow.config import Config, EnvironmentConfig
from rhymeflow.core.events import EnvironmentFailed, EpisodeEnded, Event, Observed, RewardFailed
from rhymeflow.core.types import InstanceId, SuiteName, TrajectoryId, Version
from rhymeflow.data.prompts import Prompt
from rhymeflow.errors import UserError
from rhymeflow.runtime.evaluation import AnswerKey, Evaluations
from rhymeflow.runtime.in_flight import Drawn, InFlight
from rhymeflow.runtime.openings import HeldOutRow, Opened, Openings
from rhymeflow.runtime.rewards import Rewards
from rhymeflow.runtime.throughput import Throughput
from rhymeflow.store.base import TrajectoryStore
from rhymeflow.suites.sections import RUN, uses_environments
from rhymeflow.utils.consecutive_failures import ConsecutiveFailures
from rhymeflow.workers import messages
from rhymeflow.workers.noise import EVALUATION_EPOCH

Subject = TrajectoryId | AnswerKey
"""A response with turns: one that is trained on, or a held-out answer."""

Asked = messages.OpenEpisode | messages.AskEnvironment | messages.JudgeEpisode
Said = (
    messages.EpisodeOpened
    | messages.TurnAnswered
    | messages.EpisodeEnded
    | messages.EpisodeJudged
    | messages.EnvironmentFailed
)


ANSWERS: Mapping[type, tuple[type, ...]] = {
    messages.OpenEpisode: (messages.EpisodeOpened, messages.EnvironmentFailed),
    messages.AskEnvironment: (
        messages.TurnAnswered,
        messages.EpisodeEnded,
        messages.EnvironmentFailed,
    ),
    messages.JudgeEpisode: (messages.EpisodeJudged, messages.EnvironmentFailed),
}
"""What may be answered to what is asked."""


class Environments:
    """Asks the environment worker, and makes events of what it says.

    `send` reaches the environment worker, `continue_answer` an instance.
    """

    def __init__(
        self,
        send: Callable[[messages.Message], None],
        continue_answer: Callable[[InstanceId, messages.ContinueAnswer], None],
        in_flight: InFlight,
        evaluations: Evaluations,
        rewards: Rewards,
        throughput: Throughput,
        store: TrajectoryStore,
        config: Config,
    ) -> None:
        self._send, self._continue_answer = send, continue_answer
        self._in_flight, self._evaluations, self._rewards = in_flight, evaluations, rewards
        self._throughput, self._config = throughput, config.environment
        self._max_length = config.rollout.max_completion_length
        self._failures = ConsecutiveFailures(
            config.environment.max_consecutive_failures, "environment.max_consecutive_failures"
        )
        self._is_used = uses_environments(config)
        self._asked: dict[str, tuple[Subject | Opened, Asked]] = {}
        """What the environment worker has not answered, by the key it was given."""
        self.openings = Openings(
            self._put,
            self._begin_answers,
            in_flight,
            evaluations,
            store,
            is_used=bool(config.environment.classes),
        )
        rewards.judge_episodes_with(self._judge)

    # -- what happened to the policy ----------------------------------------------------------

    def turn_ended(self, trajectory: TrajectoryId) -> None:
        """A turn of a response, which is stored, is over: ask its environment."""
        group = self._in_flight[trajectory.group]
        group.turns_ended[trajectory.member] = len(self._in_flight.turns(trajectory)) + 1
        self._ask(trajectory)

    def answer_turn_ended(self, instance: InstanceId, message: messages.AnswerTurnEnded) -> None:
        """A turn of a held-out answer is over."""
        key = self._evaluations.turn_ended(instance, message)
        self._ask(key)

    def close(self, trajectories: Iterable[TrajectoryId]) -> None:
        """Nobody waits for these any more."""
        begun = [t for t in trajectories if self._in_flight.turns_ended(t)]
        self._close(map(_key, begun))

    def leave(self, instance: InstanceId) -> None:
        """An instance is gone, and with it the held-out answers that it was making."""
        if self._is_used:
            self._close(map(_key, self._evaluations.begun(instance)))

    def _close(self, keys: Iterable[str]) -> None:
        if chosen := list(keys):
            for key in chosen:
                self._asked.pop(key, None)
            self._send(messages.CloseEpisodes(chosen))

    def ask_again(self) -> None:
        """Another worker has taken the place of one that was lost."""
        for _, message in self._asked.values():
            self._send(message)

    # -- what the worker says -----------------------------------------------------------------

    def take(self, message: Said) -> Iterator[Event]:
        """The events that an answer makes, if it still makes any.

        Raises:
            UserError: an environment failed, and the run is to stop then; or too many in a row.
        """
        subject, asked = self._asked.get(message.key, (None, None))
        if asked is None or not isinstance(message, ANSWERS[type(asked)]):
            return  # nobody waits for it, or what was asked before has been taken back
        del self._asked[message.key]
        if isinstance(subject, TrajectoryId) and subject not in self._in_flight:
            return
        if isinstance(message, messages.EnvironmentFailed):
            self._failures.count(message.error)
            is_judged = isinstance(asked, messages.JudgeEpisode)
            yield from self._failed(subject, message, is_judged=is_judged)
            return
        self._failures.count(None)
        if isinstance(message, messages.EpisodeOpened):
            self._close([message.key])  # of those that answer later each is an object of its own
            yield from self.openings.take(subject, message.opening)
            return
        if isinstance(message, messages.EpisodeJudged):
            self._rewards.judged(subject, message.rewards)
            return
        self._throughput.add_turn(message.figures)
        if isinstance(subject, AnswerKey):
            self._continue_held_out(subject, message)
        elif isinstance(message, messages.TurnAnswered):
            length = self._in_flight.observe(subject, message.tokens)
            yield Observed(subject, message.turn, length, *_figures(message))
        else:
            self._rewards.finished(subject, message.reason)
            if not self._config.classes:
                self._close([message.key])
            yield EpisodeEnded(subject, message.turn, message.reason, *_figures(message))

    def _begin_answers(self, instance: InstanceId, version: Version, row: HeldOutRow) -> None:
        suite = self._evaluations.suites[row.suite]
        for sample in range(suite.suite.n):
            answer = messages.AnswerId(version, *row, sample)
            prompt_ids = suite.prompt_ids[row.row]
            message = messages.ContinueAnswer(answer, prompt_ids, [], turn=1, turn_start=0)
            self._continue_answer(instance, message)

    def _continue_held_out(
        self, key: AnswerKey, message: messages.TurnAnswered | messages.EpisodeEnded
    ) -> None:
        if isinstance(message, messages.EpisodeEnded):
            self._evaluations[key].reason = message.reason
            if not self._section_of(key).classes:
                self._close([message.key])
            self._rewards.answer_complete(key)
            return
        tokens = self._evaluations.observe(key, message.tokens)
        self._continue_answer(
            key.instance,
            messages.ContinueAnswer(
                key.answer,
                self._evaluations.suites[key.answer.suite].prompt_ids[key.answer.row],
                tokens,
                turn=message.turn + 1,
                turn_start=len(tokens),
            ),
        )

    def _failed(
        self, subject: Subject | Opened, message: messages.EnvironmentFailed, *, is_judged: bool
    ) -> Iterator[Event]:
        suite = RUN if isinstance(subject, TrajectoryId | Drawn) else _suite(subject)
        section = self._config
        if suite != RUN:
            section = self._evaluations.suites[suite].suite.config.environment
        # Without its opening a prompt cannot even become a group that is dropped.
        if section.on_failure == "stop" or isinstance(subject, Drawn):
            raise UserError(message.error)
        if isinstance(subject, AnswerKey):
            self._close([message.key])
            yield from self._rewards.answers_failed([subject], message.error)
        elif isinstance(subject, HeldOutRow):
            keys = self.openings.failed(subject)
            yield from self._rewards.answers_failed(keys, message.error)
        elif is_judged:
            yield RewardFailed(subject, message.error)
        else:
            yield EnvironmentFailed(subject, message.turn, message.error)

    # -- asking -------------------------------------------------------------------------------

    def _ask(self, subject: Subject) -> None:
        """Have the last turn answered."""
        episode, length = self._episode(subject)
        longest = self._max_length
        if isinstance(subject, AnswerKey):
            suite = self._evaluations.suites[subject.answer.suite].suite
            longest = suite.config.rollout.max_completion_length
        room = longest - length - 1  # at least one token of the next turn
        self._put(subject, messages.AskEnvironment(episode, room))

    def _judge(self, subject: Subject) -> None:
        """Have what the environment makes of a complete response computed."""
        episode, _ = self._episode(subject)
        self._put(subject, messages.JudgeEpisode(episode))

    def _put(self, subject: Subject | Opened, message: Asked) -> None:
        key = message.episode.key
        if key in self._asked:  # taken for complete while it waited for an answer
            self._close([key])
        self._asked[key] = subject, message
        self._send(message)

    def _episode(self, subject: Subject) -> tuple[messages.Episode, int]:
        """All that the environment is to know, and how many tokens the response has."""
        prompt: Prompt
        if isinstance(subject, AnswerKey):
            prompt, epoch = self._evaluations.prompt(subject), EVALUATION_EPOCH
            _, suite, row, _ = subject.answer
            opening = self._evaluations.openings.get((suite, row), "")
            answer = self._evaluations[subject]
            tokens, turns, num_ended = answer.tokens, answer.turns, answer.turns_ended
        else:
            group = self._in_flight[subject.group]
            prompt, epoch, opening, suite = group.prompt, group.epoch, group.opening, RUN
            tokens, turns = self._in_flight.tokens(subject), self._in_flight.turns(subject)
            num_ended = self._in_flight.turns_ended(subject)
        ends = [0, *(end for _, end in turns)]
        sampled = [tokens[a:b] for a, (b, _) in zip(ends, turns, strict=False)]
        if num_ended > len(turns):
            sampled.append(tokens[ends[-1] :])
        episode = messages.Episode(
            _key(subject),
            prompt.row,
            epoch,
            prompt.prompt,
            prompt.columns,
            sampled,
            [tokens[a:b] for a, b in turns],
            opening,
            suite,
        )
        return episode, len(tokens)

    def _section_of(self, key: AnswerKey) -> EnvironmentConfig:
        return self._evaluations.suites[key.answer.suite].suite.config.environment


def _suite(subject: AnswerKey | HeldOutRow) -> SuiteName:
    return subject.answer.suite if isinstance(subject, AnswerKey) else subject.suite


def _key(subject: Subject) -> str:
    """What names it, for users too."""
    return f"trajectory {subject}" if isinstance(subject, TrajectoryId) else str(subject)


def _figures(message: Any) -> tuple[float, int, int]:
    figures: messages.TurnFigures = message.figures
    return figures.seconds, figures.calls, figures.failed_calls
