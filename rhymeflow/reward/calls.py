"""Calls reward functions in a pool of processes (`rhymeflow/pool.py`).

A request has one response, or several to the same prompt; each function is called once for all of
them. Timeouts and retries apply to one call of one function."""

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
    """Call these functions, given by index, in this order, until one fails."""

    request: RewardRequest
    functions: list[int]


class Value(PoolMessage):
    """A function's reward for each response, or None where it does not apply."""

    values: list[float | None]
    noted: list[tuple[str, float]]  # metrics that it logged; see `Logged`
    extra: dict[str, list[Any]]


@dataclass(slots=True)
class FunctionRewards:
    """Results of all functions of a request. `components[i]` maps the names of functions to their
    rewards for response i, without functions that do not apply to it."""

    components: list[dict[str, float]]
    noted: list[tuple[str, float]] = field(default_factory=list)
    extra: dict[str, list[Any]] = field(default_factory=dict)


class RewardTask(Task):
    """Scores responses with functions (indices into `names`), with `FunctionRewards` as result.
    `key` names the responses in errors."""

    def __init__(
        self, key: Hashable, request: RewardRequest, functions: Sequence[int], names: Sequence[str]
    ) -> None:
        assert functions, f"{key}: no function is given"
        super().__init__(key)
        self.request, self._names = request, names
        self._missing = list(functions)
        self._values: dict[int, list[float | None]] = {}
        self._rewards = FunctionRewards([{} for _ in request.completions])

    def begin(self, earlier: None) -> RewardCall:
        """Return the call of all functions that have not answered."""
        self.part = self._missing[0]
        return RewardCall(self.id, self.request, self._missing)

    def take(self, reply: Value) -> None:
        """Store the rewards of one function; set the result after the last one."""
        function = self._missing.pop(0)
        self._values[function] = reply.values
        self._rewards.noted += reply.noted
        for column, values in reply.extra.items():
            is_taken = column in self._rewards.extra  # by another function
            name = f"{self._names[function]}/{column}" if is_taken else column
            self._rewards.extra[name] = values
        if self._missing:
            self.part = self._missing[0]
            return
        for function, values in sorted(self._values.items()):
            for components, value in zip(self._rewards.components, values, strict=True):
                if value is not None:
                    components[self._names[function]] = value
        self.result = self._rewards

    def where(self) -> str:
        """Return the name of the current function and the key."""
        return f"reward function {self._names[self.part]!r}, {self.key}"


def reward_pool(config: RewardConfig, log: Path | None = None) -> Pool:
    """Return a pool that runs the configured functions; their output is appended to `log`."""
    names = "reward functions " + ", ".join(each.function for each in config.functions)
    return Pool(config, names, _imported, (config.model_dump_json(),), Value, log)


def _imported(config_json: str) -> Callable[[Connection], None]:
    config = RewardConfig.model_validate_json(config_json)
    return partial(_serve, [Judge(function) for function in config.functions])


def _serve(judges: list[Judge], connection: Connection) -> None:
    decode = msgspec.msgpack.Decoder(RewardCall).decode
    # One event loop for all calls, so that HTTP clients stay connected.
    with asyncio.Runner() as runner:
        while True:
            call = decode(connection.recv_bytes())
            for index in call.functions:
                judge = judges[index]
                try:
                    values = judge(call.request, runner)
                except NotAReward as error:
                    connection.send_bytes(encode(Failure(call.id, clipped(str(error)))))
                    break
                logged = judge.logged
                value = Value(call.id, values, logged.metrics, logged.extra)
                connection.send_bytes(encode(value))
