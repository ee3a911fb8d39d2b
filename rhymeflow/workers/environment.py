"""The environment worker: answers the policy's turns, and judges what came of them.

It decodes a turn's tokens to text, has the environment answer it, and encodes the answer. The
environments run in processes of their own (`environments/executor.py`), which this one starts,
times and kills; so the controller neither decodes tokens nor waits for user code.

Holds true: each question is answered once, by an answer or by why there is none (law 6), unless its
episode is closed. What is asked for says all that was said before; where the environment is not
there (a new worker, a crash), it is brought to the same turn again, and what it answers on the way
must be the very tokens that were observed. Knows nothing of versions, nor of what is trained on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from rhymeflow.config import Config
from rhymeflow.data.encode import PromptEncoder
from rhymeflow.data.generators import derived_seed
from rhymeflow.environments.executor import EnvironmentExecutor
from rhymeflow.environments.kinds import Kind, kind_of, load_kinds
from rhymeflow.environments.messages import Answer, Opening, Said
from rhymeflow.environments.rendering import ChatRenderer, TextRenderer, Unrenderable, encoded
from rhymeflow.environments.requests import (
    EpisodeAnswer,
    EpisodeError,
    EpisodeOpening,
    EpisodeReward,
    Outcome,
    Request,
)
from rhymeflow.environments.tools import Schema
from rhymeflow.models.tokenizer import load_tokenizer
from rhymeflow.utils import output
from rhymeflow.workers.channel import Connection
from rhymeflow.workers.messages import (
    Alive,
    AskEnvironment,
    CloseEpisodes,
    EnvironmentFailed,
    Episode,
    EpisodeEnded,
    EpisodeJudged,
    EpisodeOpened,
    JudgeEpisode,
    OpenEpisode,
    Shutdown,
    TurnAnswered,
    TurnFigures,
    receive,
    send,
)

ALIVE_SECONDS = 1.0
"""How often it gives a sign of life when there is nothing to say."""

NOT_REPRODUCIBLE = (
    "it is not reproducible: after `reset` and the same turns it answered turn {turn} otherwise "
    "than the first time (is something random that is not drawn from `seed`?)"
)


def main(connection: Connection, name: str, config: Config, run_dir: Path) -> None:
    """Serve the run until `Shutdown`."""
    kinds = load_kinds(config.environment)
    schemas = [kind.schemas() for kind in kinds]
    executor = EnvironmentExecutor(config.environment, schemas, output.path())
    executor.start()
    try:
        tokenizer = load_tokenizer(config.model)
        EnvironmentWorker(connection, executor, config, kinds, schemas, tokenizer).serve()
    finally:
        executor.close()


@dataclass
class Renderers:
    """How the episodes of one kind become text and tokens."""

    tokenizer: Any
    schemas: list[Schema]
    has_step: bool

    @cached_property
    def text(self) -> TextRenderer:
        """For prompts that are text."""
        return TextRenderer(self.tokenizer, self.schemas)

    @cached_property
    def chat(self) -> ChatRenderer:
        """For prompts that went through the chat template; `UserError` if that does not do."""
        return ChatRenderer(self.tokenizer, self.schemas, reads_users=self.has_step)


class _Turns(Sequence[Said]):
    """What the policy said in each turn, made of its tokens when it is looked at: of an environment
    that is there only the last turn is asked."""

    def __init__(self, tokens: list[list[int]], renderer: TextRenderer) -> None:
        self._tokens, self._renderer = tokens, renderer

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, turn: Any) -> Any:
        return self._renderer.said(self._tokens[turn])


@dataclass
class _Asked:
    """A question that is not answered yet."""

    episode: Episode
    room: int
    kind: int
    renderer: TextRenderer
    began: float = field(default_factory=time.monotonic)


class EnvironmentWorker:
    """Answers `OpenEpisode`, `AskEnvironment` and `JudgeEpisode`.

    Raises:
        UserError: the tokenizer's chat template does not do for conversations.
    """

    def __init__(
        self,
        connection: Connection,
        executor: EnvironmentExecutor,
        config: Config,
        kinds: list[Kind],
        schemas: list[list[Schema]],
        tokenizer: Any,
    ) -> None:
        self._connection, self._executor, self._config = connection, executor, config
        self._encoder = PromptEncoder(tokenizer, config.data)
        self._names = [kind.name for kind in kinds]
        self._renderers = [
            Renderers(tokenizer, each, kind.methods is None)
            for kind, each in zip(kinds, schemas, strict=True)
        ]
        if self._encoder.wraps("text"):
            for each in self._renderers:
                _ = each.chat  # so that a run whose template does not do ends before it begins
        self._asked: dict[str, _Asked] = {}
        self._last_sent = 0.0
        self._ending = False

    def serve(self) -> None:
        """Receive questions, send answers, until `Shutdown`."""
        while not self._ending:
            self._wait()
            self.turn()

    def turn(self) -> None:
        """Receive what has arrived, and send the answers that there are."""
        while not self._ending and self._connection.poll(0.0):
            self._take(receive(self._connection))
        now = time.monotonic()
        for outcome in self._executor.poll(now):
            self._answer(outcome)
            self._last_sent = now
        if now - self._last_sent >= ALIVE_SECONDS:
            send(self._connection, Alive())
            self._last_sent = now

    def _wait(self) -> None:
        """Until there is something to do, or a sign of life is due."""
        deadline, patience = self._executor.next_deadline(), ALIVE_SECONDS
        if deadline is not None:
            patience = min(patience, max(0.0, deadline - time.monotonic()))
        to_read: list[Any] = [self._connection, *self._executor.connections()]
        wait(to_read, patience)

    def _take(
        self,
        message: OpenEpisode | AskEnvironment | JudgeEpisode | CloseEpisodes | Shutdown,
    ) -> None:
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

    def _submit(
        self, episode: Episode, room: int, *, judges: bool = False, opens: bool = False
    ) -> None:
        kind = kind_of(self._names, episode.columns, f"environment of {episode.key}")
        renderers = self._renderers[kind]
        renderer = renderers.chat if self._encoder.wraps(episode.prompt) else renderers.text
        self._asked[episode.key] = _Asked(episode, room, kind, renderer)
        seed = derived_seed(self._config.run.seed, episode.row, episode.epoch)
        opening = Opening(kind, seed, episode.prompt, episode.columns, episode.opening)
        turns = _Turns(episode.turns, renderer)
        accepts = _same_answers(episode, renderer)
        self._executor.submit(Request(episode.key, opening, turns, judges, accepts, opens))

    def _answer(self, outcome: Outcome) -> None:
        asked = self._asked.pop(outcome.key)
        key, turn = outcome.key, len(asked.episode.turns)
        match outcome:
            case EpisodeError(message=message):
                send(self._connection, EnvironmentFailed(key, turn, message))
            case EpisodeOpening(text=text):
                send(self._connection, EpisodeOpened(key, text))
            case EpisodeReward(value=value):
                rewards = {} if value is None else {self._names[asked.kind]: value}
                send(self._connection, EpisodeJudged(key, rewards))
            case EpisodeAnswer(answered=answered):
                figures = TurnFigures(answered.seconds, answered.calls, answered.failed_calls)
                self._answer_turn(asked, answered.answer, figures)

    def _answer_turn(self, asked: _Asked, answer: Answer, figures: TurnFigures) -> None:
        episode = asked.episode
        turn = len(episode.turns)
        try:
            tokens = encoded(asked.renderer, answer, episode.turns[-1])
        except Unrenderable as error:
            self._executor.close_episodes([episode.key])
            what = f"environment of {episode.key}, turn {turn}: {error}"
            send(self._connection, EnvironmentFailed(episode.key, turn, what))
            return
        if tokens is None:
            ended = EpisodeEnded(episode.key, turn, "stop", figures)
        elif turn >= self._config.environment.max_turns:
            ended = EpisodeEnded(episode.key, turn, "max_turns", figures)
        elif len(tokens) > asked.room:
            ended = EpisodeEnded(episode.key, turn, "length", figures)
        else:
            send(self._connection, TurnAnswered(episode.key, turn, tokens, figures))
            return
        send(self._connection, ended)


def _same_answers(episode: Episode, renderer: TextRenderer) -> Callable[[int, Answer], str | None]:
    """What looks at answers that were given before, when they are given again."""

    def accepts(turn: int, answer: Answer) -> str | None:
        if turn >= len(episode.observed):
            return None  # it was not observed
        try:
            tokens = encoded(renderer, answer, episode.turns[turn])
        except Unrenderable as error:
            return str(error)
        if tokens == episode.observed[turn]:
            return None
        return NOT_REPRODUCIBLE.format(turn=turn + 1)

    return accepts
