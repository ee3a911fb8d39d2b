"""The environment worker: decodes the policy's turns, has them answered, encodes the observations.

Environments run in a pool of processes (`rhymeflow/pool.py`). A request holds the whole episode; it
gets one reply, which may be a failure (law 6), or none if its episode is closed. An agent's
programs, which are not replayed, are lost with this worker.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rhymeflow.config import Config
from rhymeflow.environments.episode import TurnFigures
from rhymeflow.environments.episodes import Episodes, EpisodeTask
from rhymeflow.environments.messages import Answered, Called, Left, Opened, Rewarded
from rhymeflow.environments.template import load_settled
from rhymeflow.pool import Pool, Refused
from rhymeflow.suites.suite import environment_sections
from rhymeflow.utils import objects
from rhymeflow.utils.process import output_path
from rhymeflow.workers import messages
from rhymeflow.workers.channel import Channel
from rhymeflow.workers.messages import Message
from rhymeflow.workers.user_code import UserCodeWorker

if TYPE_CHECKING:
    from rhymeflow.environments.agents import Agents, AgentTask


def main(connection: Channel, name: str, config: Config, run_dir: Path) -> None:
    """Serve the run until `Shutdown`."""
    tokenizer, _ = load_settled(config)
    episodes: Episodes | Agents
    pool: Pool | Agents
    if config.environment.agent is not None:
        from rhymeflow.environments.agents import Agents  # imports an HTTP server

        episodes = pool = Agents(config, tokenizer, output_path(), objects.address())
    else:
        episodes = Episodes(config, environment_sections(config), tokenizer)
        pool = episodes.pool(output_path())
    try:
        pool.start()
        worker = EnvironmentWorker(connection, pool, episodes, config.emulation.scale)
        worker.latency = (config.emulation.environment_seconds or 0.0) / config.emulation.scale
        worker.serve()
    finally:
        pool.close()


class EnvironmentWorker(UserCodeWorker):
    """Answers `AskEnvironment`; `scale`: seconds of the run in one of this machine."""

    def __init__(
        self,
        connection: Channel,
        pool: Pool | Agents,
        episodes: Episodes | Agents,
        scale: float = 1.0,
    ) -> None:
        super().__init__(connection, pool)
        self._episodes, self._scale = episodes, scale

    def _take(self, message: Message) -> None:
        match message:
            case messages.AskEnvironment(episode, wants, room):
                self._submit(self._episodes.task(episode, wants, room))
            case messages.AnswerCall():
                assert not isinstance(self._episodes, Episodes), "there is no agent"
                self._episodes.answer(*msgspec.structs.astuple(message))
            case messages.TurnGrew():
                assert not isinstance(self._episodes, Episodes), "there is no agent"
                self._episodes.grow(*msgspec.structs.astuple(message))
            case messages.CloseEpisodes(keys=keys):
                self._pool.drop(keys)
            case _:
                raise AssertionError(f"unexpected message {message}")

    def _reply(self, task: EpisodeTask | AgentTask) -> Message:
        key, turn = task.episode.key, len(task.episode.turns)
        match task.result:
            case Opened(text=text):
                return messages.EpisodeOpened(key, text)
            case Rewarded(value=value):
                return messages.EpisodeJudged(
                    key, {} if value is None else {task.environment: value}
                )
            case Called(number, tokens, follows, until, figures, is_streamed):
                about = number, tokens, follows, until, self._scaled(figures)
                return messages.CallMade(key, *about, is_streamed)
            case Left(number):
                return messages.CallLeft(key, number)
            case Answered(figures=figures):
                try:
                    observed = task.observed()
                    return messages.TurnAnswered(key, turn, observed, self._scaled(figures))
                except Refused as error:
                    self._pool.drop([key])
                    return messages.EpisodeFailed(key, turn, str(error))
        assert task.error is not None
        return messages.EpisodeFailed(key, turn, task.error, task.is_lost)

    def _scaled(self, figures: TurnFigures) -> TurnFigures:
        """Return figures with the run's seconds."""
        seconds = max(figures.seconds, self.latency) * self._scale
        return msgspec.structs.replace(figures, seconds=seconds)
