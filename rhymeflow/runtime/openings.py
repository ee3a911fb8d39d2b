"""Prompts on their way to become groups: where there are environments, each is opened first.

What an environment says when it begins is put after its prompt, for the whole group: its members
have one prompt. Held-out prompts are opened once, before they are first answered.

Holds true: groups are reported in the order in which their prompts were drawn, so a run that is
taken up again draws those that were not reported, and no other. Knows nothing of turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rhymeflow.core.events import GroupCreated
from rhymeflow.core.types import GroupId, InstanceId, Version
from rhymeflow.data.prompts import Prompt
from rhymeflow.runtime.evaluation import Evaluations
from rhymeflow.runtime.in_flight import Drawn, InFlight
from rhymeflow.store.base import TrajectoryStore
from rhymeflow.workers import messages
from rhymeflow.workers.noise import EVALUATION_EPOCH

Opened = Drawn | int
"""What is opened: a prompt that was drawn, or a row of the held-out ones."""


@dataclass(slots=True)
class Pending:
    """A prompt that was drawn."""

    drawn: Drawn
    opening: str | None = None


class Openings:
    """Has prompts opened where `is_used`; `ask` asks the environment worker.

    `begin_answer` has an instance answer an opened held-out prompt.
    """

    def __init__(
        self,
        ask: Callable[[Opened, messages.OpenEpisode], None],
        begin_answer: Callable[[InstanceId, Version, int], None],
        in_flight: InFlight,
        evaluations: Evaluations,
        store: TrajectoryStore,
        *,
        is_used: bool,
    ) -> None:
        self._ask, self._begin_answer, self._is_used = ask, begin_answer, is_used
        self._in_flight, self._evaluations, self._store = in_flight, evaluations, store
        self._pending: dict[GroupId, Pending] = {}
        """In the order in which they were drawn."""
        self._to_answer: dict[int, list[tuple[InstanceId, Version]]] = {}
        """Of each held-out row that is being opened: who is to answer it, under which version."""
        if not is_used:
            for row in range(len(evaluations.prompts)):
                self._put_held_out(row)

    def request(self) -> list[GroupCreated]:
        """Take the next prompt; return the event where it needs no opening."""
        return self._add(self._in_flight.draw())

    def retry(self, group: GroupId) -> list[GroupCreated]:
        """The same of an ended group's prompt."""
        return self._add(self._in_flight.draw_again(group))

    def evaluate(self, instance: InstanceId, version: Version) -> None:
        """`instance` is to answer the held-out prompts, each as soon as it is opened."""
        if not self._is_used:
            return
        for row, prompt in enumerate(self._evaluations.prompts):
            if row in self._evaluations.openings:
                self._begin_answer(instance, version, row)
                continue
            is_asked = row in self._to_answer
            self._to_answer.setdefault(row, []).append((instance, version))
            if not is_asked:
                key = f"held-out row {row}"
                self._ask(row, _question(key, row, EVALUATION_EPOCH, prompt))

    def take(self, subject: Opened, opening: str) -> Iterator[GroupCreated]:
        """It is opened; report what that completes."""
        if isinstance(subject, int):
            self._evaluations.open(subject, opening)
            self._put_held_out(subject)
            for instance, version in self._to_answer.pop(subject):
                self._begin_answer(instance, version, subject)
            return
        self._pending[subject.group].opening = opening
        for group, pending in list(self._pending.items()):
            if pending.opening is None:
                return
            del self._pending[group]
            yield self._in_flight.add(pending.drawn, pending.opening)

    def _put_held_out(self, row: int) -> None:
        evaluations = self._evaluations
        prompt, ids = evaluations.whole_prompt(row), evaluations.prompt_ids[row]
        self._store.put_held_out(row, prompt=prompt, prompt_tokens=ids)

    def _add(self, drawn: Drawn) -> list[GroupCreated]:
        if not self._is_used:
            return [self._in_flight.add(drawn)]
        self._pending[drawn.group] = Pending(drawn)
        key = f"group {drawn.group}"
        self._ask(drawn, _question(key, drawn.prompt.row, drawn.epoch, drawn.prompt))
        return []


def _question(key: str, row: int, epoch: int, prompt: Prompt) -> messages.OpenEpisode:
    episode = messages.Episode(key, row, epoch, prompt.prompt, prompt.columns, [], [])
    return messages.OpenEpisode(episode)
