"""Columns that have the name of an argument, looked for before a run begins.

Holds true: functions are imported only where there are such columns, and in another process.
"""

from __future__ import annotations

from collections.abc import Mapping

from rhymeflow.config import Config, RewardFunction
from rhymeflow.core.types import SuiteName
from rhymeflow.data.prompts import Prompt, PromptSource
from rhymeflow.data.run_prompts import LOOKED_AT
from rhymeflow.errors import UserError
from rhymeflow.reward.functions import BUILT_IN, TRAINER_ARGUMENTS, Judge
from rhymeflow.suites.sections import reward_sections
from rhymeflow.utils.apart import apart

_ADDED = {*TRAINER_ARGUMENTS, "solution_str"}
"""Arguments that some functions are given besides `data.prompts.RESERVED`."""

_Asked = list[tuple[RewardFunction, Prompt]]


def check_arguments(config: Config, sources: Mapping[SuiteName, PromptSource]) -> None:
    """Look whether a function would be given something else than a column of this name.

    `sources`: the prompts of each of `reward_sections`.

    Raises:
        UserError: one would, or cannot be imported.
    """
    asked: _Asked = []
    for name, functions in reward_sections(config).items():
        rows = map(sources[name].__getitem__, range(min(len(sources[name]), LOOKED_AT)))
        first = next((each for each in rows if not _ADDED.isdisjoint(each.columns)), None)
        if first is not None:
            asked += [(each, first) for each in functions if each.function not in BUILT_IN]
    if asked:
        names = [function.function for function, _ in asked]
        apart(_check, asked, names)


def _check(asked: _Asked) -> None:
    for function, prompt in asked:
        if (problem := Judge(function).replaced(prompt.columns)) is not None:
            raise UserError(f"{prompt.where}: reward function {function.function}: {problem}")
