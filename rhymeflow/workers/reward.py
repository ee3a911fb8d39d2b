"""The reward worker: decodes responses to text and has the reward functions judge them.

A message asks about one response or several to the same prompt, and says by which functions; where
it names none, the text is all that is asked for.

The functions run in processes of their own (`reward/executor.py`), which this one starts, times and
kills; so the controller neither decodes tokens nor waits for user code.

Holds true: each message is answered once, by rewards or by why there are none (law 6). Knows
nothing of which responses are trained on, versions or what a reward is for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from rhymeflow.config import Config
from rhymeflow.data.encode import PromptEncoder
from rhymeflow.models.tokenizer import load_tokenizer
from rhymeflow.reward.components import component_names
from rhymeflow.reward.executor import Outcome, RewardDone, RewardExecutor
from rhymeflow.reward.messages import RewardRequest
from rhymeflow.suites.sections import reward_sections
from rhymeflow.utils import output
from rhymeflow.workers.channel import Connection
from rhymeflow.workers.messages import (
    ComputeReward,
    Message,
    RewardComputed,
    RewardFailed,
    Shutdown,
    send,
)
from rhymeflow.workers.user_code import UserCodeWorker


def main(connection: Connection, name: str, config: Config, run_dir: Path) -> None:
    """Serve the run until `Shutdown`."""
    sections = reward_sections(config).values()
    functions = tuple(chain.from_iterable(sections))
    names = tuple(chain.from_iterable(map(component_names, sections)))
    reward = config.reward.model_copy(update={"functions": functions})
    executor = RewardExecutor(reward, output.path(), names)
    if functions:
        executor.start()
    try:
        tokenizer = load_tokenizer(config.model)
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        has_model = any(each.function == "reward_model" for each in functions)
        seen = PromptEncoder(tokenizer, config.data).seen if has_model else None
        RewardWorker(connection, executor, decode, seen).serve()
    finally:
        executor.close()


Prompt = str | list[dict[str, Any]]


class RewardWorker(UserCodeWorker[Outcome]):
    """Answers `ComputeReward`; `decode` turns token ids into text, and `seen`, where a reward model
    asks for it, a prompt into what the policy was given."""

    _executor: RewardExecutor

    def __init__(
        self,
        connection: Connection,
        executor: RewardExecutor,
        decode: Callable[[list[int]], str],
        seen: Callable[[Prompt], Prompt] | None = None,
    ) -> None:
        super().__init__(connection, executor)
        self._decode, self._seen = decode, seen
        self._said: dict[str, tuple[list[str], list[str]]] = {}
        """Of what is not answered yet: the texts, and where there are turns those of the last."""

    def _take(self, message: Message) -> None:
        match message:
            case ComputeReward(key=key, prompt=prompt, responses=responses, columns=columns):
                texts = [self._decode(tokens) for tokens in responses]
                turns = [
                    [self._decode(part) for part in parts_of(tokens, answers)]
                    for tokens, answers in zip(responses, message.turns, strict=bool(message.turns))
                ]
                last_turns = [parts[-1] for parts in turns]
                if not message.functions:
                    nothing: list[dict[str, float]] = [{} for _ in texts]
                    send(self._connection, RewardComputed(key, texts, nothing, last_turns))
                    return
                self._said[key] = texts, last_turns
                state = message.trainer_state
                seen = None if self._seen is None else self._seen(prompt)
                request = RewardRequest(prompt, texts, responses, columns, state, turns, seen)
                self._executor.submit(key, request, message.functions)
            case Shutdown():
                self._ending = True
            case _:
                raise AssertionError(f"unexpected message {message}")

    def _answer(self, outcome: Outcome) -> None:
        key = outcome.key
        assert isinstance(key, str)
        texts, last_turns = self._said.pop(key)
        if isinstance(outcome, RewardDone):
            components, noted = list(outcome.components), list(outcome.noted)
            computed = RewardComputed(key, texts, components, last_turns, noted, outcome.extra)
            send(self._connection, computed)
        else:
            send(self._connection, RewardFailed(key, texts, outcome.message))


def parts_of(tokens: list[int], answers: list[tuple[int, int]]) -> list[list[int]]:
    """What the policy said and what was answered, by turns; an odd number of parts."""
    ends = [0, *(place for answer in answers for place in answer), len(tokens)]
    return [tokens[start:end] for start, end in pairwise(ends)]
