"""Prompts on their way to become groups: where there are environments, each is opened first.

What an environment says when it begins is put after its prompt, for the whole group: its members
have one prompt. Held-out prompts are opened once, before they are first answered.

Holds true: groups are reported in the order in which their prompts were drawn, so a run that is
taken up again draws those that were not reported, and no other. Knows nothing of turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rhymeflow.core.events import GroupCreated
from rhymeflow.core.types import HELD_OUT, GroupId, InstanceId, SuiteName, Version
from rhymeflow.data.prompts import Prompt
from rhymeflow.runtime.evaluation import AnswerKey, Evaluations
from rhymeflow.runtime.in_flight import Drawn, InFlight
from rhymeflow.store.base import TrajectoryStore
from rhymeflow.suites.sections import RUN
from rhymeflow.workers import messages
from rhymeflow.workers.messages import AnswerId
from rhymeflow.workers.noise import EVALUATION_EPOCH


class HeldOutRow(NamedTuple):
    """A prompt of a suite."""

    suite: SuiteName
    row: int


Opened = Drawn | HeldOutRow
"""What is opened: a prompt that was drawn, or one of a suite."""


@dataclass(slots=True)
class Pending:
    """A prompt that was drawn."""

    drawn: Drawn
    opening: str | None = None


class Openings:
    """Has prompts opened, the run's where `is_used`, and a suite's where it has environments.

    `ask` asks the environment worker. `begin_answers` has an instance answer an opened prompt of a
    suite.
    """

    def __init__(
        self,
        ask: Callable[[Opened, messages.OpenEpisode], None],
        begin_answers: Callable[[InstanceId, Version, HeldOutRow], None],
        in_flight: InFlight,
        evaluations: Evaluations,
        store: TrajectoryStore,
        *,
        is_used: bool,
    ) -> None:
        self._ask, self._begin_answers, self._is_used = ask, begin_answers, is_used
        self._in_flight, self._evaluations, self._store = in_flight, evaluations, store
        self._pending: dict[GroupId, Pending] = {}
        """In the order in which they were drawn."""
        self._to_answer: dict[HeldOutRow, list[tuple[InstanceId, Version]]] = {}
        """Of each that is being opened: who is to answer it, under which version."""
        for name, suite in evaluations.suites.items():
            if not suite.suite.config.environment.classes:
                for row in range(len(suite.prompts)):
                    self._put_held_out(HeldOutRow(name, row))

    def request(self) -> list[GroupCreated]:
        """Take the next prompt; return the event where it needs no opening."""
        return self._add(self._in_flight.draw())

    def retry(self, group: GroupId) -> list[GroupCreated]:
        """The same of an ended group's prompt."""
        return self._add(self._in_flight.draw_again(group))

    def evaluate(self, instance: InstanceId, suite: SuiteName, version: Version) -> None:
        """`instance` is to answer a suite's prompts, each as soon as it is opened."""
        known = self._evaluations.suites[suite]
        if not known.suite.config.environment.classes:
            return  # it has them all
        for number, prompt in enumerate(known.prompts):
            row = HeldOutRow(suite, number)
            if row in self._evaluations.openings:
                self._begin_answers(instance, version, row)
                continue
            is_asked = row in self._to_answer
            self._to_answer.setdefault(row, []).append((instance, version))
            if not is_asked:
                of = "held-out row" if suite == HELD_OUT else f"suite {suite}, row"
                self._ask(row, _question(f"{of} {number}", number, EVALUATION_EPOCH, prompt, suite))

    def take(self, subject: Opened, opening: str) -> Iterator[GroupCreated]:
        """It is opened; report what that completes."""
        if isinstance(subject, HeldOutRow):
            self._evaluations.open(*subject, opening)
            self._put_held_out(subject)
            for instance, version in self._to_answer.pop(subject):
                self._begin_answers(instance, version, subject)
            return
        self._pending[subject.group].opening = opening
        for group, pending in list(self._pending.items()):
            if pending.opening is None:
                return
            del self._pending[group]
            yield self._in_flight.add(pending.drawn, pending.opening)

    def failed(self, row: HeldOutRow) -> list[AnswerKey]:
        """It cannot be opened; return the answers that there will not be."""
        samples = range(self._evaluations.suites[row.suite].suite.n)
        return [
            AnswerKey(instance, AnswerId(version, *row, sample))
            for instance, version in self._to_answer.pop(row)
            for sample in samples
        ]

    def _put_held_out(self, row: HeldOutRow) -> None:
        prompt = self._evaluations.whole_prompt(*row)
        ids = self._evaluations.suites[row.suite].prompt_ids[row.row]
        self._store.put_held_out(*row, prompt=prompt, prompt_tokens=ids)

    def _add(self, drawn: Drawn) -> list[GroupCreated]:
        if not self._is_used:
            return [self._in_flight.add(drawn)]
        self._pending[drawn.group] = Pending(drawn)
        key = f"group {drawn.group}"
        self._ask(drawn, _question(key, drawn.prompt.row, drawn.epoch, drawn.prompt))
        return []


def _question(
    key: str, row: int, epoch: int, prompt: Prompt, suite: SuiteName = RUN
) -> messages.OpenEpisode:
    text, columns = prompt.prompt, prompt.columns
    episode = messages.Episode(key, row, epoch, text, columns, [], [], suite=suite)
    return messages.OpenEpisode(episode)
