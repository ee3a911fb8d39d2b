"""Tries reward functions on a short response before a run, as the run calls them: in a process,
and with `reward.timeout`. Functions that ask a server or run a model are not tried."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rhymeflow.config import Config, RewardFunction
from rhymeflow.data.prompts import Prompt
from rhymeflow.errors import UserError
from rhymeflow.pool import Pool
from rhymeflow.reward.calls import RewardTask, reward_pool
from rhymeflow.reward.components import component_names
from rhymeflow.reward.messages import RewardRequest, TrainerState

RESPONSE = "0"  # the response that is scored

_NOT_TRIED = {"llm_judge": "it asks a server", "reward_model": "it runs a model"}


def tried(
    config: Config,
    functions: Sequence[RewardFunction],
    prompt: Prompt,
    encode: Callable[[str], list[int]],
    say: Callable[[str], object],
) -> list[str]:
    """Call each function for `prompt`; return a line about each result. A function that is called
    per group gets as many responses as a group has. `encode` tokenizes a response; `say` gets the
    functions' output. Raises `UserError` if a function fails so that a run would stop."""
    names = component_names(functions)
    reasons = [_NOT_TRIED.get(each.function) for each in functions]
    lines = [f"{name}: not tried, {reason}" for name, reason in zip(names, reasons, strict=True)]
    to_call = [index for index, reason in enumerate(reasons) if reason is None]
    if not to_call:
        return lines
    called = tuple(functions[index] for index in to_call)
    reward = config.reward.model_copy(update={"functions": called, "num_workers": 1, "retries": 0})
    key = f"on a response {RESPONSE!r} to {prompt.where}"
    with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as log:
        pool, called_names = reward_pool(reward, Path(log.name)), [names[i] for i in to_call]
        try:
            pool.start()
            for place, index in enumerate(to_call):
                count = config.rollout.num_generations if called[place].per == "group" else 1
                responses, ids = [RESPONSE] * count, [encode(RESPONSE)] * count
                state = TrainerState(0, config.learner.max_steps)
                request = RewardRequest(prompt.prompt, responses, ids, prompt.columns, state)
                pool.submit(RewardTask(key, request, [place], called_names))
                lines[index] = f"{names[index]}: {_outcome(pool, config.reward.on_failure)} {key}"
        finally:
            pool.close()
            say(log.read())
    return lines


def _outcome(pool: Pool, on_failure: str) -> str:
    """Wait for the pool's only task; return its reward, or that it has none and why."""
    while not (tasks := pool.poll(time.monotonic())):
        pool.wait(1.0)
    [task] = tasks
    if task.error is not None:
        if on_failure == "stop":
            raise UserError(task.error)
        return f"no reward ({task.error})"
    values = list(task.result.components[0].values())
    return f"{values[0]:g}" if values else "None (does not apply)"
