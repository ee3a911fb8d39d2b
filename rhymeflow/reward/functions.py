"""Imports reward functions by name, and calls them with the arguments that they take.

Functions have TRL's signature, or verl's, `compute_score(data_source, solution_str, ground_truth)`,
which is recognised by its parameters and gets one response per call, without special tokens. Each
call gets its own copies of the arguments."""

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
from rhymeflow.reward.code_execution import code_execution
from rhymeflow.reward.llm_judge import llm_judge
from rhymeflow.reward.messages import RewardRequest
from rhymeflow.utils.user_modules import function_of, imported
from rhymeflow.utils.user_values import Arguments, described, reward_numbers

BUILT_IN: dict[str, Any] = {**SCORERS, "code_execution": code_execution, "llm_judge": llm_judge}
"""Factories of the built-in functions by name."""

TRAINER_ARGUMENTS = ("trainer_state", "log_metric", "log_extra")
"""TRL's arguments that come neither from the data nor from the responses."""

ABSENT = ("data_source", "extra_info")
"""Arguments that verl always passes; without such columns they are None and an empty mapping."""

ARGUMENTS_OF_OTHERS = {
    "queries": "OpenRLHF",
    "prompt_ids": "AReaL",
    "sample": "slime",
    "data_sources": "verl",
}
"""Arguments by which other trainers' functions are known, and the trainers."""


class NotAReward(Exception):  # noqa: N818 - it is what happened
    """A function raised, or returned something that is no reward; the message says what."""


class Logged:
    """Metrics and columns that a function logs by TRL's `log_metric` and `log_extra`."""

    def __init__(self) -> None:
        self.metrics: list[tuple[str, float]] = []
        self.extra: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Add a value to the metric `name`, of which the mean over a step is logged."""
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}, {value!r}): not a finite number")
        self.metrics.append((str(name), number))

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Log a value for each response; values other than numbers and text become text."""
        self.extra.setdefault(str(column), []).extend(map(_sendable, values))


def _sendable(value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:  # NumPy's, torch's
        value = value.item()
    is_plain = value is None or type(value) in (str, bool, float)
    if is_plain or (type(value) is int and -(2**63) <= value < 2**64):
        return value
    return str(value)


class Judge:
    """A reward function, imported and bound to its options."""

    def __init__(self, config: RewardFunction) -> None:
        self._name = config.function
        where = f"reward function {self._name}"
        self.logged = Logged()  # metrics and columns of the last call
        self._options: dict[str, Any] = {}
        self._adds: tuple[str, ...] = ()
        """Arguments that are not from the data, and whose names no column may have."""
        if self._name in BUILT_IN:
            self._function = _built_in(config, where)
            self._takes = Arguments(self._function)
            if "log_metric" in self._takes.names:
                self._adds = TRAINER_ARGUMENTS
            return
        self._function = _imported(self._name, where)
        self._takes = Arguments(self._function)
        self._takes.check_options(config.options, where)
        if _is_verl(self._takes.names):
            known = ("solution_str", *ABSENT, *config.options)
            needed = [name for name in self._takes.needed if name not in known]
            self._function = self._as_trl_calls(self._function, self._takes, config.options)
            self._takes = Arguments(self._function)  # of the wrapper, which takes any column
            self._takes.needed += needed
            self._adds = ("solution_str",)
        else:
            self._options, self._adds = config.options, TRAINER_ARGUMENTS

    def __call__(self, request: RewardRequest, runner: asyncio.Runner) -> list[float | None]:
        """Call the function once; return a finite number or None for each response. Coroutines run
        in `runner`. Raises `NotAReward`."""
        self.logged = Logged()
        arguments = self._arguments(request)
        try:
            result = self._function(**arguments)
            if inspect.isawaitable(result):
                result = runner.run(_awaited(result))
        # User code may raise anything.
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
        if (problem := self._conflict(request.columns)) is not None:
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

    def _conflict(self, columns: Collection[str]) -> str | None:
        """Return an error if a column has the name of an argument that is not from the data."""
        for name in self._adds:
            if name in columns and (self._takes.takes_all or name in self._takes.names):
                return (
                    f"the data has a column {name!r}, which is the name of an argument that the "
                    "function is given; rename the column"
                )
        return None

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise `UserError` if data with these columns lacks an argument of the function, or has a
        column with the name of an argument that is not from the data."""
        if (problem := self._conflict(columns)) is not None:
            raise UserError(f"reward function {self._name}: {problem}")
        given = {*columns, *self._options, *RESERVED, *TRAINER_ARGUMENTS}
        if (name := self._takes.missing(given)) is not None:
            known = ARGUMENTS_OF_OTHERS
            theirs = next((known[each] for each in self._takes.names if each in known), "")
            raise UserError(
                f"reward function {self._name}: takes an argument {name!r}, and the data has "
                f"no such column{nearest(name, set(columns))}"
                + (theirs and f" (a function of {theirs}'s? docs/from-others.md wraps it)")
            )

    def _as_trl_calls(
        self, function: Callable[..., Any], takes: Arguments, options: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """Wrap verl's function for TRL's arguments. Of a dictionary that it returns, `score` is the
        reward; the rest is logged, numbers as metrics."""
        known = {*takes.names, *ABSENT}

        async def score(completions: list[Any], **columns: Any) -> list[Any]:
            results = []
            for number, completion in enumerate(completions):
                row = {name: each[number] for name, each in columns.items() if name in known}
                row = {"data_source": None, **row, "extra_info": row.get("extra_info") or {}}
                arguments = {**takes.chosen(row), **options, "solution_str": content(completion)}
                result = function(**arguments)
                result = await result if inspect.isawaitable(result) else result
                results.append(result if isinstance(result, dict) else {"score": result})
            for name in {name: None for each in results for name in each if name != "score"}:
                values = [_sendable(each.get(name)) for each in results]
                self.logged.log_extra(name, values)
                for value in values:
                    if isinstance(value, int | float) and math.isfinite(value):
                        self.logged.log_metric(name, value)
            return [each["score"] for each in results]

        return score


async def _awaited(result: Any) -> Any:
    return await result


def _is_verl(names: Collection[str]) -> bool:
    return "solution_str" in names and "ground_truth" in names and "completions" not in names


def _conversation(prompt: str | list[dict[str, Any]], request: RewardRequest) -> dict[str, Any]:
    """Return TRL's arguments `prompts` and `completions`, each with an entry for every response.

    A completion is text if the prompt is text and there are no environments, else a list of
    messages. If the prompt ends with the beginning of the response, that goes to the completion.
    Environments' answers are messages of the role `tool`, as the policy read them but without
    special tokens."""
    texts, begun = request.completions, ""
    if isinstance(prompt, str) and not request.turns:
        return {"prompts": [prompt] * len(texts), "completions": list(texts)}
    if not isinstance(prompt, str) and prompt and prompt[-1]["role"] == "assistant":
        begun, prompt = prompt[-1]["content"], prompt[:-1]
    turns = request.turns or [[text] for text in texts]
    completions = [
        [
            {
                "role": "tool" if number % 2 else "assistant",
                "content": text if number else begun + text,
            }
            for number, text in enumerate(parts)
        ]
        for parts in turns
    ]
    return {"prompts": _repeated(prompt, len(texts)), "completions": completions}


def _repeated(value: Any, count: int) -> list[Any]:
    """Return copies of the value, one for each response, because user code may change them."""
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
