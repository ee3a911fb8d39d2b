"""The environment worker: answers the policy's turns, and judges what came of them.

It decodes a turn's tokens to text, has the environment answer it, and encodes the answer
(`environments/episodes.py`). The environments run in processes of their own
(`environments/executor.py`), which this one starts, times and kills; so the controller neither
decodes tokens nor waits for user code.

Holds true: each question is answered once, by an answer or by why there is none (law 6), unless its
episode is closed. What is asked for says all that was said before; where the environment is not
there (a new worker, a crash), it is brought to the same turn again, and what it answers on the way
must be the very tokens that were observed. Knows nothing of versions, nor of what is trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rhymeflow.config import Config
from rhymeflow.environments.episode import Episode, TurnFigures
from rhymeflow.environments.episodes import Episodes, SuiteEpisodes
from rhymeflow.environments.executor import EnvironmentExecutor
from rhymeflow.environments.kinds import load_kinds
from rhymeflow.environments.messages import Answer
from rhymeflow.environments.rendering import Unrenderable
from rhymeflow.environments.requests import (
    EpisodeAnswer,
    EpisodeError,
    EpisodeOpening,
    EpisodeReward,
    Outcome,
)
from rhymeflow.models.tokenizer import load_tokenizer
from rhymeflow.suites.sections import environment_sections
from rhymeflow.utils import output
from rhymeflow.workers.channel import Connection
from rhymeflow.workers.messages import (
    AskEnvironment,
    CloseEpisodes,
    EnvironmentFailed,
    EpisodeEnded,
    EpisodeJudged,
    EpisodeOpened,
    JudgeEpisode,
    Message,
    OpenEpisode,
    Shutdown,
    TurnAnswered,
    send,
)
from rhymeflow.workers.user_code import UserCodeWorker


def main(connection: Connection, name: str, config: Config, run_dir: Path) -> None:
    """Serve the run until `Shutdown`."""
    own, *others = sections = environment_sections(config)
    kinds = {name: load_kinds(section) for name, section in sections.items()}
    schemas = {name: [kind.schemas() for kind in each] for name, each in kinds.items()}
    executor = EnvironmentExecutor(
        sections[own],
        list(chain.from_iterable(schemas.values())),
        output.path(),
        [sections[name] for name in others],
    )
    executor.start()
    try:
        tokenizer, first, by_suite = load_tokenizer(config.model), 0, {}
        for name, each in kinds.items():
            by_suite[name] = Episodes(config, each, schemas[name], tokenizer, first)
            first += len(each)
        episodes = SuiteEpisodes(by_suite)
        EnvironmentWorker(connection, executor, episodes).serve()
    finally:
        executor.close()


@dataclass
class _Asked:
    """A question that is not answered yet."""

    episode: Episode
    room: int


class EnvironmentWorker(UserCodeWorker[Outcome]):
    """Answers `OpenEpisode`, `AskEnvironment` and `JudgeEpisode`."""

    _executor: EnvironmentExecutor

    def __init__(
        self,
        connection: Connection,
        executor: EnvironmentExecutor,
        episodes: Episodes | SuiteEpisodes,
    ) -> None:
        super().__init__(connection, executor)
        self._episodes = episodes
        self._asked: dict[str, _Asked] = {}

    def _take(self, message: Message) -> None:
        match message:
            case OpenEpisode(episode=episode):
                self._submit(episode, 0, opens=True)
            case AskEnvironment(episode=episode, room=room):
                self._submit(episode, room)
            case JudgeEpisode(episode=episode):
                self._submit(episode, 0, judges=True)
            case CloseEpisodes(keys=keys):
                self._executor.close_episodes(keys)
                for key in keys:
                    self._asked.pop(key, None)
            case Shutdown():
                self._ending = True
            case _:
                raise AssertionError(f"unexpected message {message}")

    def _submit(self, episode: Episode, room: int, **wanted: bool) -> None:
        request = self._episodes.request(episode, **wanted)
        self._asked[episode.key] = _Asked(episode, room)
        self._executor.submit(request)

    def _answer(self, outcome: Outcome) -> None:
        asked = self._asked.pop(outcome.key)
        key, turn = outcome.key, len(asked.episode.turns)
        match outcome:
            case EpisodeError(message=message):
                send(self._connection, EnvironmentFailed(key, turn, message))
            case EpisodeOpening(text=text):
                send(self._connection, EpisodeOpened(key, text))
            case EpisodeReward(value=value):
                rewards = {} if value is None else {self._episodes.name(asked.episode): value}
                send(self._connection, EpisodeJudged(key, rewards))
            case EpisodeAnswer(answered=answered):
                figures = TurnFigures(answered.seconds, answered.calls, answered.failed_calls)
                self._answer_turn(asked, answered.answer, figures)

    def _answer_turn(self, asked: _Asked, answer: Answer, figures: TurnFigures) -> None:
        episode = asked.episode
        turn = len(episode.turns)
        try:
            observed = self._episodes.observed(episode, answer, asked.room)
        except Unrenderable as error:
            self._executor.close_episodes([episode.key])
            send(self._connection, EnvironmentFailed(episode.key, turn, str(error)))
            return
        if isinstance(observed, str):
            send(self._connection, EpisodeEnded(episode.key, turn, observed, figures))
        else:
            send(self._connection, TurnAnswered(episode.key, turn, observed, figures))
