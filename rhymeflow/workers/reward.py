"""The reward worker: decodes responses to text and has the reward functions judge them.

A message asks about one response or several to the same prompt, and says by which functions; where
it names none, the text is all that is asked for.

The functions run in processes of their own (`reward/executor.py`), which this one starts, times and
kills; so the controller neither decodes tokens nor waits for user code.

Holds true: each message is answered once, by rewards or by why there are none (law 6). Knows
nothing of which responses are trained on, versions or what a reward is for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from multiprocessing.connection import wait
from pathlib import Path

from rhymeflow.config import Config
from rhymeflow.models.tokenizer import load_tokenizer
from rhymeflow.reward.executor import Outcome, RewardDone, RewardExecutor
from rhymeflow.reward.messages import RewardRequest
from rhymeflow.utils import output
from rhymeflow.workers.channel import Connection
from rhymeflow.workers.messages import (
    Alive,
    ComputeReward,
    RewardComputed,
    RewardFailed,
    Shutdown,
    receive,
    send,
)

ALIVE_SECONDS = 1.0
"""How often it gives a sign of life when there is nothing to say."""


def main(connection: Connection, name: str, config: Config, run_dir: Path) -> None:
    """Serve the run until `Shutdown`."""
    executor = RewardExecutor(config.reward, output.path())
    if config.reward.functions:
        executor.start()
    try:
        tokenizer = load_tokenizer(config.model)
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        RewardWorker(connection, executor, decode).serve()
    finally:
        executor.close()


class RewardWorker:
    """Answers `ComputeReward`; `decode` turns token ids into text."""

    def __init__(
        self,
        connection: Connection,
        executor: RewardExecutor,
        decode: Callable[[list[int]], str],
    ) -> None:
        self._connection, self._executor, self._decode = connection, executor, decode
        self._texts: dict[str, list[str]] = {}
        """Of what is not answered yet."""
        self._last_sent = 0.0
        self._ending = False

    def serve(self) -> None:
        """Receive responses, send answers, until `Shutdown`."""
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
        wait([self._connection, *self._executor.connections()], patience)

    def _take(self, message: ComputeReward | Shutdown) -> None:
        match message:
            case ComputeReward(key=key, prompt=prompt, responses=responses, columns=columns):
                texts = self._texts[key] = [self._decode(tokens) for tokens in responses]
                if not message.functions:
                    components: list[dict[str, float]] = [{} for _ in texts]
                    send(self._connection, RewardComputed(key, self._texts.pop(key), components))
                    return
                turns = [
                    [self._decode(part) for part in parts_of(tokens, answers)]
                    for tokens, answers in zip(responses, message.turns, strict=bool(message.turns))
                ]
                state = message.trainer_state
                request = RewardRequest(prompt, texts, responses, columns, state, turns)
                self._executor.submit(key, request, message.functions)
            case Shutdown():
                self._ending = True
            case _:
                raise AssertionError(f"unexpected message {message}")

    def _answer(self, outcome: Outcome) -> None:
        key = outcome.key
        assert isinstance(key, str)
        texts = self._texts.pop(key)
        if isinstance(outcome, RewardDone):
            send(self._connection, RewardComputed(key, texts, list(outcome.components)))
        else:
            send(self._connection, RewardFailed(key, texts, outcome.message))


def parts_of(tokens: list[int], answers: list[tuple[int, int]]) -> list[list[int]]:
    """What the policy said and what was answered, by turns; an odd number of parts."""
    ends = [0, *(place for answer in answers for place in answer), len(tokens)]
    return [tokens[start:end] for start, end in pairwise(ends)]
