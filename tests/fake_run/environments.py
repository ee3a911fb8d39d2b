"""An environment worker whose answers are hashes of the turns so far, and the conversations that
come of it; where a question says what was answered before, it has to be that."""

import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from rhymeflow.config import Config
from rhymeflow.engine.base import NoiseKey
from rhymeflow.workers import messages
from rhymeflow.workers.channel import Channel
from rhymeflow.workers.messages import Message, receive, send
from tests.fake_run import models
from tests.fake_run.world import World

NAME = "Fake"
ANSWERED = 0.4  # probability that a question is answered when it is this worker's turn


def answer(turns: Sequence[Sequence[int]]) -> list[int] | None:
    """What is said to the last of these, or None: it is over. Some of it would end a turn."""
    hashed = zlib.crc32(repr([list(turn) for turn in turns]).encode())
    if hashed % 3 == 0:
        return None
    return [(hashed >> shift) % 98 for shift in range(hashed % 4 + 1)]


def judged(turns: Sequence[Sequence[int]]) -> float:
    return models.reward([token for turn in turns for token in turn])


class Conversation(NamedTuple):
    """A response with turns."""

    tokens: list[int]
    turns: list[list[int]]  # those that an environment was told


def conversation(key: NoiseKey, config: Config) -> Conversation:
    """All of the response that has this noise."""
    length = config.rollout.max_completion_length
    if not config.environment.is_used:
        return Conversation(models.response(key, length), [])
    tokens: list[int] = []
    turns: list[list[int]] = []
    while True:
        turn: list[int] = []
        while len(tokens) + len(turn) < length and models.STOP not in turn:
            turn.append(models.token(key, len(tokens) + len(turn)))
        tokens += turn
        if models.STOP not in turn:
            return Conversation(tokens, turns)
        turns.append(turn)
        said = answer(turns)
        is_last = len(turns) >= config.environment.max_turns
        if said is None or is_last or len(said) > length - len(tokens) - 1:
            return Conversation(tokens, turns)
        tokens += said


class FakeEnvironments:
    """An environment worker; so many of the questions fail."""

    def __init__(self, connection: Channel, config: Config, world: World, failures: float) -> None:
        self._connection, self._world, self._failures = connection, world, failures
        self._max_turns = config.environment.max_turns
        self._asked: dict[str, messages.AskEnvironment] = {}

    def turn(self) -> None:
        while self._connection.poll(0.0):
            message = receive(self._connection)
            if isinstance(message, messages.CloseEpisodes):
                for key in message.keys:
                    self._asked.pop(key, None)
            else:
                assert message.episode.key not in self._asked
                self._asked[message.episode.key] = message
        for key in [key for key in self._asked if self._world.chance(ANSWERED)]:
            send(self._connection, self._said(self._asked.pop(key)))
        if self._world.chance(0.3):
            send(self._connection, messages.Alive())

    def _said(self, message: messages.AskEnvironment) -> Message:
        episode = message.episode
        key, turn = episode.key, len(episode.turns)
        self._check(episode)
        if message.wants == "opening":
            return messages.EpisodeOpened(key, "")
        if self._world.chance(self._failures):
            self._world.counts["environment failed"] += 1
            return messages.EpisodeFailed(key, turn, f"{key}: broken")
        if message.wants == "reward":
            return messages.EpisodeJudged(key, {NAME: judged(episode.turns)})
        said = answer(episode.turns)
        if said is None:
            said = "stop"
        elif turn >= self._max_turns:
            said = "max_turns"
        elif len(said) > message.room:
            said = "length"
        return messages.TurnAnswered(key, turn, said, messages.TurnFigures())

    def _check(self, episode: messages.Episode) -> None:
        ends = range(1, len(episode.turns) + 1)
        said = [answer(episode.turns[:end]) for end in ends]
        assert episode.observed == said[: len(episode.observed)], "it was told something else"
        assert all(b is not None for b, _ in pairwise(said)), "it was over before"
