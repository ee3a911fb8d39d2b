"""The reward worker: decodes responses to text and has reward functions judge them.

A request has responses to one prompt and the functions to call; without functions it asks only for
text. Functions run in a pool of processes (`rhymeflow/pool.py`). Each request gets one reply:
rewards, or why there are none (law 6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from rhymeflow.config import Config
from rhymeflow.data.encode import PromptEncoder, Tokenizer
from rhymeflow.environments.template import load_settled
from rhymeflow.pool import Pool
from rhymeflow.reward.calls import RewardTask, reward_pool
from rhymeflow.reward.components import component_names
from rhymeflow.reward.messages import RewardRequest
from rhymeflow.suites.suite import reward_sections
from rhymeflow.utils.process import output_path
from rhymeflow.workers.channel import Channel
from rhymeflow.workers.messages import ComputeReward, Message, NoReward, RewardComputed, send
from rhymeflow.workers.user_code import UserCodeWorker


def main(connection: Channel, name: str, config: Config, run_dir: Path) -> None:
    """Serve the run until `Shutdown`."""
    sections = reward_sections(config).values()
    functions = tuple(chain.from_iterable(sections))
    names = tuple(chain.from_iterable(map(component_names, sections)))
    tokenizer, _ = load_settled(config)
    pool = reward_pool(config.reward.model_copy(update={"functions": functions}), output_path())
    if functions:
        pool.start()  # from now on what is printed is the functions'
    try:
        decode = decoder(tokenizer, config)
        has_model = any(each.function == "reward_model" for each in functions)
        seen = PromptEncoder(tokenizer, config.data).seen if has_model else None
        worker = RewardWorker(connection, pool, names, decode, seen)
        worker.latency = (config.emulation.reward_seconds or 0.0) / config.emulation.scale
        worker.serve()
    finally:
        pool.close()


def decoder(tokenizer: Tokenizer, config: Config) -> Callable[[list[int]], str]:
    """Return what makes text of token ids, for reward functions."""
    skips = config.rollout.skip_special_tokens
    return partial(tokenizer.decode, skip_special_tokens=skips)


Prompt = str | list[dict[str, Any]]


class RewardWorker(UserCodeWorker):
    """Answers `ComputeReward`. `names`: of the functions; `decode`: makes text of token ids;
    `seen`: makes of a prompt what the policy got, for a reward model."""

    def __init__(
        self,
        connection: Channel,
        pool: Pool,
        names: Sequence[str],
        decode: Callable[[list[int]], str],
        seen: Callable[[Prompt], Prompt] | None = None,
    ) -> None:
        super().__init__(connection, pool)
        self._names, self._decode, self._seen = names, decode, seen

    def _take(self, message: Message) -> None:
        assert isinstance(message, ComputeReward), f"unexpected message {message}"
        responses = message.responses
        texts = [self._decode(tokens) for tokens in responses]
        all_observations, has_turns = message.observations, bool(message.observations)
        turns = [
            [self._decode(part) for part in parts_of(tokens, observations)]
            for tokens, observations in zip(responses, all_observations, strict=has_turns)
        ]
        if not message.functions:
            no_rewards: list[dict[str, float]] = [{} for _ in texts]
            send(self._connection, RewardComputed(message.key, texts, no_rewards, _last(turns)))
            return
        seen = None if self._seen is None else self._seen(message.prompt)
        request = RewardRequest(
            message.prompt, texts, responses, message.columns, message.trainer_state, turns, seen
        )
        self._submit(RewardTask(message.key, request, message.functions, self._names))

    def _reply(self, task: RewardTask) -> Message:
        texts, key = task.request.completions, str(task.key)
        if task.error is not None:
            return NoReward(key, texts, task.error)
        result, last = task.result, _last(task.request.turns)
        return RewardComputed(key, texts, result.components, last, result.noted, result.extra)


def parts_of(tokens: list[int], observations: list[tuple[int, int]]) -> list[list[int]]:
    """Split a response into the policy's turns and the observations between them."""
    ends = [0, *(place for observation in observations for place in observation), len(tokens)]
    return [tokens[start:end] for start, end in pairwise(ends)]


def _last(turns: list[list[str]]) -> list[str]:
    return [parts[-1] for parts in turns]
