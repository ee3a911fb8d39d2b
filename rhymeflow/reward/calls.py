"""Calls of reward functions in processes of their own (`rhymeflow/pool.py`).

A request is judged as a whole: one response, or several to the same prompt, in one call of each
function that is asked for. A timeout and a retry are those of a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from rhymeflow.config import RewardConfig
from rhymeflow.pool import Failure, Pool, PoolMessage, Task, clipped, encode
from rhymeflow.reward.functions import Judge, NotAReward
from rhymeflow.reward.messages import RewardRequest


class RewardCall(PoolMessage):
    """Call these functions (by index, in this order) up to the first that gives no reward."""

    request: RewardRequest
    functions: list[int]


class Value(PoolMessage):
    """A function's reward of each response, or None where it does not apply."""

    values: list[float | None]
    noted: list[tuple[str, float]]
    """What it logged (`reward/functions.py`)."""
    extra: dict[str, list[Any]]


@dataclass(slots=True)
class FunctionRewards:
    """For each response, the reward of each function by name (of those that applied to it)."""

    components: list[dict[str, float]]
    noted: list[tuple[str, float]] = field(default_factory=list)
    extra: dict[str, list[Any]] = field(default_factory=dict)


class RewardTask(Task):
    """Has these functions (by index in `names`) judge responses; `key`, as text, says in errors
    what was judged. The result is `FunctionRewards`."""

    def __init__(
        self,
        key: Hashable,
        request: RewardRequest,
        functions: Sequence[int],
        names: Sequence[str],
    ) -> None:
        assert functions, f"{key}: no function is asked for"
        super().__init__(key)
        self.request, self._names = request, names
        self._missing = list(functions)
        self._values: dict[int, list[float | None]] = {}
        self._judged = FunctionRewards([{} for _ in request.completions])

    def begin(self, earlier: None) -> RewardCall:
        """Ask for what is missing."""
        self.part = self._missing[0]
        return RewardCall(self.id, self.request, self._missing)

    def take(self, reply: Value) -> None:
        """Take the rewards of one function."""
        self._values[self._missing.pop(0)] = reply.values
        self._judged.noted += reply.noted
        self._judged.extra |= reply.extra
        if self._missing:
            self.part = self._missing[0]
            return
        for function, values in sorted(self._values.items()):
            for components, value in zip(self._judged.components, values, strict=True):
                if value is not None:
                    components[self._names[function]] = value
        self.result = self._judged

    def where(self) -> str:
        """Name the function."""
        return f"reward function {self._names[self.part]!r}, {self.key}"


def reward_pool(config: RewardConfig, log: Path | None = None) -> Pool:
    """Processes that run the configured functions; what these print is appended to `log`."""
    named = "reward functions " + ", ".join(each.function for each in config.functions)
    return Pool(config, named, _imported, (config.model_dump_json(),), Value, log)


def _imported(config_json: str) -> Callable[[Connection], None]:
    config = RewardConfig.model_validate_json(config_json)
    return partial(_serve, [Judge(function) for function in config.functions])


def _serve(judges: list[Judge], connection: Connection) -> None:
    decode = msgspec.msgpack.Decoder(RewardCall).decode
    with asyncio.Runner() as runner:  # one loop for life, so that its clients stay connected
        while True:
            call = decode(connection.recv_bytes())
            for index in call.functions:
                judge = judges[index]
                try:
                    values = judge(call.request, runner)
                except NotAReward as what:
                    connection.send_bytes(encode(Failure(call.id, clipped(str(what)))))
                    break
                logged = judge.logged
                value = Value(call.id, values, logged.metrics, logged.extra)
                connection.send_bytes(encode(value))
