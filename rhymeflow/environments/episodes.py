"""Tasks that bring an environment to the present turn of an episode, and its answers as tokens.

Sampled tokens are decoded and never encoded again. An answer is encoded once; the answers of an
environment that replaces a lost one are compared with the earlier tokens.
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
from rhymeflow.environments import messages
from rhymeflow.environments.episode import Episode
from rhymeflow.environments.kinds import Kind, load_kinds
from rhymeflow.environments.live import imported
from rhymeflow.environments.rendering import ChatRenderer, TextRenderer
from rhymeflow.pool import Pool, PoolMessage, Refused, Task
from rhymeflow.suites.suite import RUN
from rhymeflow.utils.user_values import shown

MAX_CONCURRENT = 256
"""Most environments that answer at the same time in one process."""

NOT_REPRODUCIBLE = (
    "it is not reproducible: after `reset` and the same turns it answered turn {turn} otherwise "
    "than the first time (is something random that is not drawn from `seed`?)"
)

End = Literal["stop", "length", "max_turns"]
"""Why an episode ends: the environment ended it, its answer is too long, or all turns are used."""

Wanted = Literal["opening", "answer", "reward"]
"""The text of `reset`, the answer to the last turn, or the reward."""


class EpisodeTask(Task):
    """Brings an environment to the episode's present turn and gets what is wanted.

    The result is `Opened`, `Answered` or `Rewarded`. Raises `Refused` if a new environment repeats
    earlier answers differently.
    """

    def __init__(
        self, episode: Episode, wants: Wanted, kind: _Rendered, seed: int, is_text: bool, room: int
    ) -> None:
        super().__init__(episode.key)
        self.episode, self.environment = episode, kind.kind.name
        self._opening = messages.Opening(kind.index, seed, episode.prompt, episode.columns)
        self._renderer = kind.text if is_text else kind.chat
        self._wants, self._room = wants, room
        self._max_turns = kind.config.environment.max_turns
        self.stays = wants != "reward"
        self.is_lost = False  # as only agents are
        self._num_answered = 0  # turns that the environment has answered
        self._doing = "reset"

    def begin(self, earlier: EpisodeTask | None) -> PoolMessage:
        """Return the first message: continue the environment of `earlier`, or open a new one."""
        if earlier is not None:
            self._num_answered = earlier._num_answered
            return self._next()
        self._num_answered, self._doing = 0, "reset"
        return messages.Open(self.id, self._opening)

    def continues(self, earlier: EpisodeTask) -> bool:
        """Whether the environment of `earlier` lacks only this turn, or only the reward."""
        missing = len(self.episode.turns) - earlier._num_answered
        return missing == 1 or (missing == 0 and self._wants == "reward")

    def _next(self) -> PoolMessage:
        turns = self.episode.turns
        if self._num_answered == len(turns):
            self._doing = "reward"
            return messages.GiveReward(self.id)
        self._doing = f"turn {self._num_answered + 1}"
        return messages.Step(self.id, self._renderer.said(turns[self._num_answered]))

    def take(self, reply: messages.Reply) -> PoolMessage | None:
        """Check the reply; return the next message, or set the result and return None."""
        match reply:
            case messages.Opened(text=text) if self._wants != "opening":
                self._check_opening(text)
                return self._next()
            case messages.Answered(answer=answer):
                self._num_answered += 1
                if self._wants != "answer" or self._num_answered < len(self.episode.turns):
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

    def _check_answer(self, answer: messages.Answer) -> None:
        turn, observed = self._num_answered, self.episode.observed
        if turn <= len(observed) and self._tokens(answer, turn) != observed[turn - 1]:
            raise Refused(NOT_REPRODUCIBLE.format(turn=turn))

    def _tokens(self, answer: messages.Answer, turn: int) -> list[int] | None:
        """Encode the answer to a turn; None, the end of the episode, stays None."""
        tokens = self.episode.turns[turn - 1]
        return None if answer is None else self._renderer.encode(answer, tokens)

    def where(self) -> str:
        """Return the names of the episode and the present step."""
        return f"environment of {self.key}, {self._doing}"

    def observed(self) -> list[int] | End:
        """Return the tokens of the answer to the last turn, or why the episode ends.

        Raises `Refused` if the answer cannot be encoded; the message names episode and turn.
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
class _Rendered:
    """A kind of environment, its index among those of all sections, and its renderers."""

    kind: Kind
    index: int
    tokenizer: Any
    schemas: list[Schema]
    config: Config

    @cached_property
    def text(self) -> TextRenderer:
        """Renderer for prompts that are text."""
        return TextRenderer(self.tokenizer, self.schemas, keeps_special=self._keeps_special)

    @cached_property
    def chat(self) -> ChatRenderer:
        """Renderer for prompts that went through the chat template."""
        return ChatRenderer(
            self.tokenizer,
            self.schemas,
            reads_users=self.kind.methods is None,
            variables=self.config.data.chat_template_kwargs,
            keeps_special=self._keeps_special,
        )

    @property
    def _keeps_special(self) -> bool:
        return not self.config.rollout.skip_special_tokens


class Episodes:
    """Makes tasks for episodes. A suite without a section in `sections` uses that of `RUN`."""

    def __init__(
        self, config: Config, sections: Mapping[SuiteName, EnvironmentConfig], tokenizer: Any
    ) -> None:
        self._sections, self._seed = list(sections.values()), config.run.seed
        self._encoder = PromptEncoder(tokenizer, config.data)
        self._schemas: list[list[Schema]] = []
        self._kinds: dict[SuiteName, list[_Rendered]] = {suite: [] for suite in sections}
        for suite, section in sections.items():
            for kind in load_kinds(section):
                schemas = kind.schemas()
                rendered = _Rendered(kind, len(self._schemas), tokenizer, schemas, config)
                if self._encoder.wraps("text"):
                    _ = rendered.chat  # an unusable chat template raises here
                self._kinds[suite].append(rendered)
                self._schemas.append(schemas)

    def pool(self, log: Path | None = None) -> Pool:
        """Return a pool that runs the environments; their output is appended to `log`."""
        names = [each.environment for section in self._sections for each in section.classes]
        description = f"environments {', '.join([*names, *self._sections[0].tools])}"
        sections = json.dumps([each.model_dump(mode="json") for each in self._sections])
        arguments = sections, json.dumps(self._schemas)
        config = self._sections[0]
        return Pool(config, description, imported, arguments, messages.Reply, log, MAX_CONCURRENT)

    def task(self, episode: Episode, wants: Wanted, room: int = 0) -> EpisodeTask:
        """Return a task for the pool; the wanted answer may have at most `room` tokens."""
        kinds = self._kinds.get(episode.suite, self._kinds[RUN])
        names = [each.kind.name for each in kinds]
        rendered = kinds[kind_of(names, episode.columns, f"environment of {episode.key}")]
        seed = derived_seed(self._seed, episode.row, episode.epoch)
        is_text = not self._encoder.wraps(episode.prompt)
        return EpisodeTask(episode, wants, rendered, seed, is_text, room)
