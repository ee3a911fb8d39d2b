"""Section `eval`: suites that a policy is evaluated on."""

from __future__ import annotations

import re
from typing import Any

from pydantic import field_validator, model_validator

from rhymeflow.config.environment import EnvironmentClass, RewardFunction
from rhymeflow.config.section import Fraction, NonNegative, Positive, Section, Temperature


class EvalSuite(Section):
    """Prompts, sampling parameters, and functions that score the responses."""

    name: str
    """Name in tables and metrics, as in `eval/NAME/avg@k`."""
    source: str | None = None
    """Source of prompts, as in `data.source`. `None`: the run's held-out prompts. The other fields
    of section `data` apply to every suite."""
    options: dict[str, Any] = {}
    """Keyword arguments of the generator that `source` names, as in `data.options`."""
    size: Positive | None = None
    """Number of prompts, from the first one; `None`: all of a file or of the held-out prompts, 64
    of a generator."""
    n: Positive = 1
    """Responses to each prompt: the k of avg@k, maj@k and of the largest pass@k."""
    temperature: Temperature | None = None
    """`None`: `run.eval_temperature` if n is 1, else `rollout.temperature`."""
    top_p: Fraction | None = None
    """Nucleus sampling. `None`: `rollout.top_p`."""
    top_k: NonNegative | None = None
    """Sample among the k likeliest tokens. `None`: `rollout.top_k`."""
    max_completion_length: Positive | None = None
    """Longest response in tokens. `None`: `rollout.max_completion_length`."""
    functions: tuple[RewardFunction, ...] | None = None
    """Reward functions; `None`: `reward.functions`."""
    environments: tuple[EnvironmentClass, ...] | None = None
    """Environment classes. `None`: `environment.classes` and `environment.tools`. If given, they
    replace both; the other fields of section `environment` apply."""
    pass_threshold: float = 1.0
    """Smallest reward with which a response passes, for pass@k."""
    answer_pattern: str | None = None
    """Regular expression that finds a response's answer, on which maj@k votes: its last match in
    the text of the last turn, or the first group of that match. `None`: the whole text."""
    steps: NonNegative = 0
    """Versions of a run between two evaluations, besides those at its start and end; 0: the run
    does not evaluate this suite, only `rhymeflow eval` does."""

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if not name.isprintable() or not all(name.split("/")) or name != name.strip():
            raise ValueError(f"{name!r} should be printable, and no part between '/' empty")
        return name

    @field_validator("answer_pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _fits_together(self) -> EvalSuite:
        if self.name == "held_out" and self.steps:
            raise ValueError(
                "steps: run.eval_steps sets how often the run's own suite held_out is evaluated; "
                "give this suite another name"
            )
        if self.options and self.source is None:
            raise ValueError("options: need a `source` in the same suite")
        return self


class EvalConfig(Section):
    """Suites that `rhymeflow eval` evaluates a policy on. A run evaluates those with `steps`, and
    always `held_out`, the run's held-out prompts (`run.eval_steps`). `held_out` is also the one
    suite of `rhymeflow eval` if none is given."""

    suites: tuple[EvalSuite, ...] = ()
    """Each is `{name: ..., source: ..., size: ..., n: ...}` and more (docs/evaluation.md)."""

    @model_validator(mode="after")
    def _have_different_names(self) -> EvalConfig:
        names = [each.name for each in self.suites]
        if len(names) > len(set(names)):
            raise ValueError(f"suites: two are named {max(names, key=names.count)!r}")
        return self
