"""From the name of a reward function to something that judges responses.

Functions have TRL's signature, or verl's, `compute_score(data_source, solution_str, ground_truth)`,
which is known by its parameters: one response a call, the text without special tokens.
What a function does to its arguments is seen by no other call.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from rhymeflow.config import RewardFunction
from rhymeflow.data.generators import task_module
from rhymeflow.data.prompts import RESERVED
from rhymeflow.errors import UserError, nearest
from rhymeflow.reward.builtin import SCORERS, content
from rhymeflow.reward.llm_judge import llm_judge
from rhymeflow.reward.messages import RewardRequest
from rhymeflow.utils.user_modules import function_of, imported
from rhymeflow.utils.user_values import Arguments, described, reward_numbers

BUILT_IN: dict[str, Callable[..., Any]] = {**SCORERS, "llm_judge": llm_judge}
"""Factories of the functions that are called by a name alone."""

TRAINER_ARGUMENTS = ("trainer_state", "log_metric", "log_extra")
"""Arguments that are neither of the data nor of the responses, as in TRL."""

ABSENT = ("data_source", "extra_info")
"""What verl always gives a function, and other data may lack: it is None then."""


class NotAReward(Exception):  # noqa: N818 - it is what happened
    """The function did something else than give a reward; the text says what."""


class Logged:
    """What a function says besides its rewards, by TRL's `log_metric` and `log_extra`."""

    def __init__(self) -> None:
        self.metrics: list[tuple[str, float]] = []
        self.extra: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Add a number to the metric `name`, whose mean over a step is logged."""
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}, {value!r}): not a finite number")
        self.metrics.append((str(name), number))

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Keep a value for each response, as text where it is neither number nor text."""
        self.extra.setdefault(str(column), []).extend(map(_sendable, values))


def _sendable(value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:  # NumPy's, torch's
        value = value.item()
    is_plain = value is None or type(value) in (str, bool, float)
    if is_plain or (type(value) is int and -(2**63) <= value < 2**64):
        return value
    return str(value)


class Judge:
    """One reward function, imported and bound to its options."""

    def __init__(self, config: RewardFunction) -> None:
        self._name = config.function
        where = f"reward function {self._name}"
        self.logged = Logged()
        """What it said besides its rewards, in the last call."""
        self._options: dict[str, Any] = {}
        self._adds: tuple[str, ...] = ()
        if self._name in BUILT_IN:
            self._function = _built_in(config, where)
            self._takes = Arguments(self._function)
            return
        self._function = _imported(self._name, where)
        self._takes = Arguments(self._function)
        self._takes.check_options(config.options, where)
        if _is_verl(self._takes.names):
            known = ("solution_str", *ABSENT, *config.options)
            needed = [name for name in self._takes.needed if name not in known]
            self._function = _as_trl_calls(self._function, self._takes, config.options)
            self._takes = Arguments(self._function)
            self._takes.needed += needed
            self._adds = ("solution_str",)
        else:
            self._options, self._adds = config.options, TRAINER_ARGUMENTS

    def __call__(self, request: RewardRequest, runner: asyncio.Runner) -> list[float | None]:
        """Return a finite number or None for each response, from one call; coroutines run in
        `runner`. `NotAReward` says what the function did instead."""
        self.logged = Logged()
        arguments = self._arguments(request)
        try:
            result = self._function(**arguments)
            if inspect.isawaitable(result):
                result = runner.run(_awaited(result))
        # User code: whatever it raises becomes a message and no reward.
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001
            raise NotAReward(f"raised {described(error)}") from None
        try:
            return reward_numbers(result, len(request.completions))
        except ValueError as error:
            raise NotAReward(str(error)) from None

    def _arguments(self, request: RewardRequest) -> dict[str, Any]:
        count = len(request.completions)
        columns = request.columns.items()
        given: dict[str, Any] = {name: _repeated(value, count) for name, value in columns}
        given |= self._options
        given |= _conversation(request.prompt, request)
        if self._name == "reward_model":
            seen = request.seen
            given["seen"] = None if seen is None else _conversation(seen, request)
        given["completion_ids"] = copy.deepcopy(request.completion_ids)
        if (problem := self._replaced(request.columns)) is not None:
            raise NotAReward(problem)
        if self._adds == TRAINER_ARGUMENTS:
            given["trainer_state"] = request.trainer_state
            given["log_metric"] = self.logged.log_metric
            given["log_extra"] = self.logged.log_extra
        if (name := self._takes.missing(given)) is not None:
            raise NotAReward(
                f"takes an argument {name!r}, and there is no such column or option"
                f"{nearest(name, request.columns)}"
            )
        return self._takes.chosen(given)

    def _replaced(self, columns: Collection[str]) -> str | None:
        """What is wrong where the function would be given something else than such a column."""
        for name in self._adds:
            if name in columns and (self._takes.takes_all or name in self._takes.names):
                return (
                    f"the data has a column {name!r}, which is the name of an argument that the "
                    "function is given; rename the column"
                )
        return None

    def check_columns(self, columns: Collection[str]) -> None:
        """Look whether data with these columns has all that the function must be given, and no
        column that it would be given something else for."""
        if (problem := self._replaced(columns)) is not None:
            raise UserError(f"reward function {self._name}: {problem}")
        given = {*columns, *self._options, *RESERVED, *TRAINER_ARGUMENTS}
        if (name := self._takes.missing(given)) is not None:
            raise UserError(
                f"reward function {self._name}: takes an argument {name!r}, and the data has "
                f"no such column{nearest(name, set(columns))}"
            )


async def _awaited(result: Any) -> Any:
    return await result


def _is_verl(names: Collection[str]) -> bool:
    return "solution_str" in names and "ground_truth" in names and "completions" not in names


def _as_trl_calls(
    function: Callable[..., Any], takes: Arguments, options: Mapping[str, Any]
) -> Callable[..., Any]:
    """A function of verl's as TRL would call it; of a dictionary that it returns, the `score`."""
    always = takes.chosen(dict.fromkeys(ABSENT))

    async def score(completions: list[Any], **columns: Any) -> list[Any]:
        found = []
        for number, completion in enumerate(completions):
            row = {name: values[number] for name, values in columns.items() if name in takes.names}
            arguments = {**always, **row, **options, "solution_str": content(completion)}
            result = function(**arguments)
            result = await result if inspect.isawaitable(result) else result
            found.append(result["score"] if isinstance(result, dict) else result)
        return found

    return score


def _conversation(prompt: str | list[dict[str, Any]], request: RewardRequest) -> dict[str, Any]:
    """Prompt and response as TRL hands them over: of messages, both are lists of messages. So are
    responses to text where there are environments, whose answers are not the policy's.

    A prompt that ends in the beginning of an answer gives that to the response. What environments
    answered are messages of the role `tool`, as the policy read them but for special tokens.
    """
    texts, begun = request.completions, ""
    if isinstance(prompt, str) and not request.turns:
        return {"prompts": [prompt] * len(texts), "completions": list(texts)}
    if not isinstance(prompt, str) and prompt and prompt[-1]["role"] == "assistant":
        begun, prompt = prompt[-1]["content"], prompt[:-1]
    turns = request.turns or [[text] for text in texts]
    answers = [
        [
            {
                "role": "tool" if number % 2 else "assistant",
                "content": text if number else begun + text,
            }
            for number, text in enumerate(parts)
        ]
        for parts in turns
    ]
    return {"prompts": _repeated(prompt, len(texts)), "completions": answers}


def _repeated(value: Any, count: int) -> list[Any]:
    """A list with the value for each response: copies, as user code may change them."""
    return [copy.deepcopy(value) for _ in range(count)]


def _built_in(config: RewardFunction, where: str) -> Callable[..., Any]:
    factory = BUILT_IN[config.function]
    Arguments(factory).check_options(config.options, where, only=True)
    try:
        function: Callable[..., Any] = factory(**config.options)
    except (UserError, TypeError) as error:
        raise UserError(f"{where}: {error}") from None
    return function


def _imported(spec: str, where: str) -> Callable[..., Any]:
    kind, _, name = spec.partition(":")
    if kind == "recipe":
        return function_of(task_module(name, where), "reward", where)
    if "." not in spec.strip("."):
        raise UserError(
            f"{where}: no built-in has this name{nearest(spec, BUILT_IN)} (or give "
            "path/to/file.py:function, or a dotted name)"
        )
    return imported(spec, where)
