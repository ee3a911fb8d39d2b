"""Reward functions and environments of a run and of the suites that it evaluates, side by side.

One reward worker and one environment worker serve them all. `RUN` names what the run itself has;
a suite that brings none of its own is judged and answered by that.

Holds true: the order is the same wherever it is asked for, so a place in it names a function in
every process of a run.
"""

from __future__ import annotations

from rhymeflow.config import Config, EnvironmentConfig, RewardFunction
from rhymeflow.core.types import SuiteName
from rhymeflow.suites.suite import of_run

RUN: SuiteName = ""
"""No suite has this name."""


def reward_sections(config: Config) -> dict[SuiteName, tuple[RewardFunction, ...]]:
    """Return the reward functions of the run, then of each suite that has some of its own."""
    suites = {
        each.name: each.config.reward.functions
        for each in of_run(config)
        if each.suite.functions is not None
    }
    return {RUN: config.reward.functions, **suites}


def functions_of(config: Config, suite: SuiteName) -> range:
    """Return the places of a suite's functions among all, in the order of `reward_sections`."""
    sections = reward_sections(config)
    wanted, first = suite if suite in sections else RUN, 0
    for name, functions in sections.items():
        if name == wanted:
            return range(first, first + len(functions))
        first += len(functions)
    raise AssertionError(wanted)


def environment_sections(config: Config) -> dict[SuiteName, EnvironmentConfig]:
    """Return section `environment` of the run, then of each suite that has classes of its own."""
    suites = {
        each.name: each.config.environment
        for each in of_run(config)
        if each.suite.environments is not None
    }
    return {RUN: config.environment, **suites}


def uses_environments(config: Config) -> bool:
    """Whether responses have turns, of the run or of a suite that it evaluates."""
    return any(section.is_used for section in environment_sections(config).values())
