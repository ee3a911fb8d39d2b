"""Episodes in tokens: what an executor is asked about one, and what its answers are in tokens.

Shared by the environment worker of a run and by `rhymeflow eval`, so that an episode is the same in
both.

Holds true: sampled tokens are decoded and never encoded again; an answer is encoded once; one that
was observed before is compared in tokens when it is given again. Knows nothing of processes,
messages, or who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from rhymeflow.config import Config
from rhymeflow.core.types import SuiteName
from rhymeflow.data.encode import PromptEncoder
from rhymeflow.data.generators import derived_seed
from rhymeflow.environments.episode import Episode
from rhymeflow.environments.kinds import Kind, kind_of
from rhymeflow.environments.messages import Answer, Opening, Said
from rhymeflow.environments.rendering import ChatRenderer, TextRenderer, Unrenderable, encoded
from rhymeflow.environments.requests import Request
from rhymeflow.environments.tools import Schema
from rhymeflow.suites.sections import RUN

NOT_REPRODUCIBLE = (
    "it is not reproducible: after `reset` and the same turns it answered turn {turn} otherwise "
    "than the first time (is something random that is not drawn from `seed`?)"
)

End = Literal["stop", "length", "max_turns"]
"""Why an episode asks for no more: it is over, what was answered does not fit, or a further turn
would be one too many."""


@dataclass
class Renderers:
    """How the episodes of one kind become text and tokens."""

    tokenizer: Any
    schemas: list[Schema]
    has_step: bool
    variables: dict[str, Any]
    """Of the chat template."""

    @cached_property
    def text(self) -> TextRenderer:
        """For prompts that are text."""
        return TextRenderer(self.tokenizer, self.schemas)

    @cached_property
    def chat(self) -> ChatRenderer:
        """For prompts that went through the chat template; `UserError` if that does not do."""
        return ChatRenderer(
            self.tokenizer, self.schemas, reads_users=self.has_step, variables=self.variables
        )


class _Turns(Sequence[Said]):
    """What the policy said in each turn, made of its tokens when it is looked at: of an environment
    that is there only the last turn is asked."""

    def __init__(self, tokens: list[list[int]], renderer: TextRenderer) -> None:
        self._tokens, self._renderer = tokens, renderer

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, turn: Any) -> Any:
        return self._renderer.said(self._tokens[turn])


class Episodes:
    """Makes requests of episodes, and tokens of answers.

    `kinds` and the `schemas` of their tools are those of a section `environment`; to the executor
    they are its kinds from number `first` on.

    Raises:
        UserError: the tokenizer's chat template does not do for conversations.
    """

    def __init__(
        self,
        config: Config,
        kinds: list[Kind],
        schemas: list[list[Schema]],
        tokenizer: Any,
        first: int = 0,
    ) -> None:
        self._first = first
        self._max_turns, self._seed = config.environment.max_turns, config.run.seed
        self._encoder = PromptEncoder(tokenizer, config.data)
        self._names = [kind.name for kind in kinds]
        self._renderers = [
            Renderers(tokenizer, each, kind.methods is None, config.data.chat_template_kwargs)
            for kind, each in zip(kinds, schemas, strict=True)
        ]
        if self._encoder.wraps("text"):
            for each in self._renderers:
                _ = each.chat  # so that what has such a template ends before it begins

    def name(self, episode: Episode) -> str:
        """Return the name of the environment that answers it, which is that of its reward."""
        return self._names[self._kind(episode)]

    def request(self, episode: Episode, *, judges: bool = False, opens: bool = False) -> Request:
        """Return what an executor is asked: to answer the last turn; or to judge, or to open."""
        renderer = self._renderer(episode)
        seed = derived_seed(self._seed, episode.row, episode.epoch)
        kind = self._kind(episode)
        opening = Opening(
            self._first + kind, seed, episode.prompt, episode.columns, episode.opening
        )
        turns = _Turns(episode.turns, renderer)
        return Request(episode.key, opening, turns, judges, _same_answers(episode, renderer), opens)

    def observed(self, episode: Episode, answer: Answer, room: int) -> list[int] | End:
        """Return the tokens of what is answered to the last turn, or why there is no further one.

        `room`: tokens that it may have.

        Raises:
            Unrenderable: the answer cannot be written; the text names episode and turn.
        """
        turn = len(episode.turns)
        try:
            tokens = encoded(self._renderer(episode), answer, episode.turns[-1])
        except Unrenderable as error:
            what = f"environment of {episode.key}, turn {turn}: {error}"
            raise Unrenderable(what) from None
        if tokens is None:
            return "stop"
        if turn >= self._max_turns:
            return "max_turns"
        return "length" if len(tokens) > room else tokens

    def _kind(self, episode: Episode) -> int:
        return kind_of(self._names, episode.columns, f"environment of {episode.key}")

    def _renderer(self, episode: Episode) -> TextRenderer:
        renderers = self._renderers[self._kind(episode)]
        return renderers.chat if self._encoder.wraps(episode.prompt) else renderers.text


class SuiteEpisodes:
    """The same for a run and its suites: `by_suite` has those of the run, and of each suite that
    has environments of its own (`suites.sections`)."""

    def __init__(self, by_suite: Mapping[SuiteName, Episodes]) -> None:
        self._by_suite = by_suite

    def name(self, episode: Episode) -> str:
        """See `Episodes`."""
        return self._of(episode).name(episode)

    def request(self, episode: Episode, *, judges: bool = False, opens: bool = False) -> Request:
        """See `Episodes`."""
        return self._of(episode).request(episode, judges=judges, opens=opens)

    def observed(self, episode: Episode, answer: Answer, room: int) -> list[int] | End:
        """See `Episodes`."""
        return self._of(episode).observed(episode, answer, room)

    def _of(self, episode: Episode) -> Episodes:
        return self._by_suite.get(episode.suite, self._by_suite[RUN])


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


__all__ = ["NOT_REPRODUCIBLE", "End", "Episodes", "Renderers", "SuiteEpisodes"]
