"""What environments are asked about an episode, and their answers as tokens.

Sampled tokens are decoded and never encoded again. An answer is encoded once; when an environment
is made anew, its answers are compared with the earlier ones, in tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from rhymeflow.config import Config, EnvironmentConfig
from rhymeflow.core.types import SuiteName
from rhymeflow.data.encode import PromptEncoder, Schema
from rhymeflow.data.generators import derived_seed
from rhymeflow.data.prompts import kind_of
from rhymeflow.environments.episode import Episode
from rhymeflow.environments.kinds import Kind, load_kinds
from rhymeflow.environments.live import imported
from rhymeflow.environments.messages import (
    Answer,
    Answered,
    GiveReward,
    Open,
    Opened,
    Opening,
    Reply,
    Step,
)
from rhymeflow.environments.rendering import ChatRenderer, TextRenderer
from rhymeflow.pool import Pool, PoolMessage, Refused, Task
from rhymeflow.suites.suite import RUN
from rhymeflow.utils.user_values import shown

MAX_CONCURRENT = 256
"""Environments that answer at once in one process."""

NOT_REPRODUCIBLE = (
    "it is not reproducible: after `reset` and the same turns it answered turn {turn} otherwise "
    "than the first time (is something random that is not drawn from `seed`?)"
)

End = Literal["stop", "length", "max_turns"]
"""Why an episode ends: it is over, the answer does not fit, or it has had its most turns."""

Wanted = Literal["opening", "answer", "reward"]
"""The text of `reset`, the answer to the last turn, or the reward."""


class EpisodeTask(Task):
    """Brings an environment to the episode's present turn and asks for what is wanted.

    The result is `Opened`, `Answered` or `Rewarded`. Earlier answers must be what they were.
    """

    def __init__(
        self, episode: Episode, wants: Wanted, kind: _Kind, seed: int, is_text: bool, room: int
    ) -> None:
        super().__init__(episode.key)
        self.episode, self.environment = episode, kind.kind.name
        self._opening = Opening(kind.number, seed, episode.prompt, episode.columns)
        self._renderer = kind.text if is_text else kind.chat
        self._wants, self._room = wants, room
        self._max_turns = kind.config.environment.max_turns
        self.stays = wants != "reward"
        self._stepped, self._doing = 0, "reset"

    def begin(self, earlier: EpisodeTask | None) -> PoolMessage:
        """Have it made, or ask for the rest."""
        if earlier is not None:
            self._stepped = earlier._stepped
            return self._next()
        self._stepped, self._doing = 0, "reset"
        return Open(self.id, self._opening)

    def continues(self, earlier: EpisodeTask) -> bool:
        """Whether it is at the turn before, or where only its reward is missing."""
        missing = len(self.episode.turns) - earlier._stepped
        return missing == 1 or (missing == 0 and self._wants == "reward")

    def _next(self) -> PoolMessage:
        turns = self.episode.turns
        if self._stepped == len(turns):
            self._doing = "reward"
            return GiveReward(self.id)
        self._doing = f"turn {self._stepped + 1}"
        return Step(self.id, self._renderer.said(turns[self._stepped]))

    def take(self, reply: Reply) -> PoolMessage | None:
        """Look at the reply, and ask the next thing or be done."""
        match reply:
            case Opened(text=text) if self._wants != "opening":
                self._check_opening(text)
                return self._next()
            case Answered(answer=answer):
                self._stepped += 1
                if self._wants != "answer" or self._stepped < len(self.episode.turns):
                    self._check_answer(answer)
                    return self._next()
        self.result = reply
        return None

    def _check_opening(self, text: str) -> None:
        if text == self.episode.opening:
            return
        if self.episode.opening:
            raise Refused("is not reproducible: it returned other text the first time")
        raise Refused(f"returned {shown(text)}, which is not in the prompt")

    def _check_answer(self, answer: Answer) -> None:
        turn, observed = self._stepped, self.episode.observed
        if turn <= len(observed) and self._tokens(answer, turn) != observed[turn - 1]:
            raise Refused(NOT_REPRODUCIBLE.format(turn=turn))

    def _tokens(self, answer: Answer, turn: int) -> list[int] | None:
        """None: the episode is over."""
        said = self.episode.turns[turn - 1]
        return None if answer is None else self._renderer.encode(answer, said)

    def where(self) -> str:
        """Name the episode and what it is asked."""
        return f"environment of {self.key}, {self._doing}"

    def observed(self) -> list[int] | End:
        """Return the tokens of what is answered to the last turn, or why there is no further one.

        `Refused` if it cannot be written; the text names episode and turn.
        """
        turn = len(self.episode.turns)
        try:
            tokens = self._tokens(self.result.answer, turn)
        except Refused as error:
            raise Refused(f"environment of {self.key}, turn {turn}: {error}") from None
        if tokens is None:
            return "stop"
        if turn >= self._max_turns:
            return "max_turns"
        return "length" if len(tokens) > self._room else tokens


@dataclass
class _Kind:
    """How the episodes of one kind of environment, number `number`, become text and tokens."""

    kind: Kind
    number: int
    tokenizer: Any
    schemas: list[Schema]
    config: Config

    @cached_property
    def text(self) -> TextRenderer:
        """For prompts that are text."""
        return TextRenderer(self.tokenizer, self.schemas)

    @cached_property
    def chat(self) -> ChatRenderer:
        """For prompts that went through the chat template."""
        has_step, variables = self.kind.methods is None, self.config.data.chat_template_kwargs
        return ChatRenderer(self.tokenizer, self.schemas, reads_users=has_step, variables=variables)


class Episodes:
    """Makes tasks of episodes. Each of `sections` answers those of its suite, and that of `RUN`
    those of all other suites."""

    def __init__(
        self, config: Config, sections: Mapping[SuiteName, EnvironmentConfig], tokenizer: Any
    ) -> None:
        self._sections, self._seed = list(sections.values()), config.run.seed
        self._encoder = PromptEncoder(tokenizer, config.data)
        self._schemas: list[list[Schema]] = []
        self._kinds: dict[SuiteName, list[_Kind]] = {suite: [] for suite in sections}
        for suite, section in sections.items():
            for kind in load_kinds(section):
                schemas = kind.schemas()
                made = _Kind(kind, len(self._schemas), tokenizer, schemas, config)
                if self._encoder.wraps("text"):
                    _ = made.chat  # so that what has such a template ends before it begins
                self._kinds[suite].append(made)
                self._schemas.append(schemas)

    def pool(self, log: Path | None = None) -> Pool:
        """Processes that run the environments; what these print is appended to `log`."""
        names = [each.environment for section in self._sections for each in section.classes]
        named = f"environments {', '.join([*names, *self._sections[0].tools])}"
        sections = json.dumps([each.model_dump(mode="json") for each in self._sections])
        arguments = sections, json.dumps(self._schemas)
        config = self._sections[0]
        return Pool(config, named, imported, arguments, Reply, log, MAX_CONCURRENT)

    def task(self, episode: Episode, wants: Wanted, room: int = 0) -> EpisodeTask:
        """Return what a pool is asked; an answer may have `room` tokens."""
        kinds = self._kinds.get(episode.suite, self._kinds[RUN])
        names = [each.kind.name for each in kinds]
        kind = kinds[kind_of(names, episode.columns, f"environment of {episode.key}")]
        seed = derived_seed(self._seed, episode.row, episode.epoch)
        is_text = not self._encoder.wraps(episode.prompt)
        return EpisodeTask(episode, wants, kind, seed, is_text, room)
