"""Environments for answers with turns: what they put after prompts, answer and judge.

Holds true: an episode is what it is in a run (`environments/episodes.py`), with the seed that
held-out answers have there; what cannot be had ends the evaluation by name (law 6). Knows nothing
of engines or reward functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

from rhymeflow.config import Config
from rhymeflow.data.prompts import Prompt, PromptSource
from rhymeflow.environments.episode import Episode
from rhymeflow.environments.episodes import Episodes, EpisodeTask, Wanted
from rhymeflow.environments.messages import Answered, Rewarded
from rhymeflow.environments.rendering import Unrenderable
from rhymeflow.errors import UserError
from rhymeflow.evaluation.answer import Answer
from rhymeflow.evaluation.waiting import wait_for
from rhymeflow.histospec.noise_sharing import EVALUATION_EPOCH
from rhymeflow.suites.sections import RUN


class Turns:
    """Asks the environments of a suite about answers to `prompts`.

    `goes_on` is called with an answer whose next turn is the policy's, `is_over` with one that is
    complete, and `is_judged` with one that its environment has judged.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        prompts: PromptSource,
        *,
        goes_on: Callable[[Answer], None],
        is_over: Callable[[Answer], None],
        is_judged: Callable[[Answer], None],
    ) -> None:
        self.judges = bool(config.environment.classes)
        """Whether answers are judged, and prompts opened: tools do neither."""
        self._episodes = Episodes(config, {RUN: config.environment}, tokenizer)
        self._executor = self._episodes.pool()
        self._goes_on, self._is_over, self._is_judged = goes_on, is_over, is_judged
        self._prompts = prompts
        self._openings: dict[int, str] = {}
        self._asked: dict[str, Answer] = {}

    def start(self) -> None:
        """Start the processes; `UserError` if they cannot import what is configured."""
        self._executor.start()

    def close(self) -> None:
        """End the processes."""
        self._executor.close()

    def open(self, rows: Iterable[int]) -> dict[int, str]:
        """Return what is put after the prompts of these rows; wait for it."""
        if not self.judges:
            return {}
        asked = {f"the prompt of row {row}": row for row in rows}
        for key, row in asked.items():
            episode = self._episode(key, self._prompts[row], [], [])
            self._executor.submit(self._episodes.task(episode, "opening"))
        while len(self._openings) < len(asked):
            outcomes = self._executor.poll(time.monotonic())
            for outcome in outcomes:
                if outcome.error is not None:
                    raise UserError(outcome.error)
                self._openings[asked[outcome.key]] = outcome.result.text
                # Of the answers each has an object of its own.
                self._executor.drop([outcome.key])
            if not outcomes:
                wait_for([self])
        return self._openings

    def ask(self, answer: Answer, room: int) -> None:
        """Have the last turn answered, in `room` tokens at most."""
        answer.num_told = len(answer.sampled)
        self._submit(answer, room, "answer")

    def judge(self, answer: Answer) -> None:
        """Have a complete answer judged."""
        self._submit(answer, 0, "reward")

    def connections(self) -> list[Connection]:
        """See `Pool`."""
        return self._executor.connections()

    def next_deadline(self) -> float | None:
        """See `Pool`."""
        return self._executor.next_deadline()

    def poll(self, now: float) -> int:
        """Hand on what has been answered, and return how many that are; never waits.

        Raises:
            UserError: an environment failed.
        """
        outcomes = self._executor.poll(now)
        for outcome in outcomes:
            self._take(outcome)
        return len(outcomes)

    def _take(self, task: EpisodeTask) -> None:
        answer = self._asked.pop(str(task.key))
        match task.result:
            case Answered():
                try:
                    observed = task.observed()
                except Unrenderable as error:
                    raise UserError(str(error)) from None
                if not isinstance(observed, str):
                    answer.observed.append(observed)
                    self._goes_on(answer)
                    return
                answer.reason = observed
                if not self.judges:
                    self._executor.drop([task.key])
                self._is_over(answer)
            case Rewarded(value=value):
                if value is not None:
                    answer.components[task.environment] = value
                self._is_judged(answer)
            case _:
                raise UserError(task.error or "")

    def _submit(self, answer: Answer, room: int, wants: Wanted) -> None:
        prompt, opening = self._prompts[answer.row], self._openings.get(answer.row, "")
        told = answer.sampled[: answer.num_told]
        episode = self._episode(answer.key, prompt, told, answer.observed, opening)
        self._asked[answer.key] = answer
        self._executor.submit(self._episodes.task(episode, wants, room))

    @staticmethod
    def _episode(
        key: str,
        prompt: Prompt,
        sampled: list[list[int]],
        observed: list[list[int]],
        opening: str = "",
    ) -> Episode:
        # What is said later is not part of what is asked now.
        about = list(sampled), list(observed)
        columns, epoch = prompt.columns, EVALUATION_EPOCH
        return Episode(key, prompt.row, epoch, prompt.prompt, columns, *about, opening)
