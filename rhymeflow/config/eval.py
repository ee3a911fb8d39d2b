"""Section `eval`: what a policy is evaluated on, `rhymeflow eval`."""

from __future__ import annotations

import re
from typing import Any

from pydantic import field_validator, model_validator

from rhymeflow.config.environment import EnvironmentClass, RewardFunction
from rhymeflow.config.section import Fraction, NonNegative, Positive, Section, Temperature


class EvalSuite(Section):
    """Prompts, how they are answered, and what judges the answers."""

    name: str
    """In tables and metrics: `eval/NAME/avg@k`. Printable, and `/` stands within only."""
    source: str | None = None
    """As `data.source`. `None`: the run's held-out prompts. The other fields of section `data`
    hold for every suite."""
    options: dict[str, Any] = {}
    """Of the generator that `source` names, as `data.options`."""
    size: Positive | None = None
    """Number of prompts, the first ones; `None`: all of a file or of what is held out, 64 of a
    generator."""
    n: Positive = 1
    """Answers to each prompt: the k of avg@k, maj@k and of the largest pass@k."""
    temperature: Temperature | None = None
    """`None`: `run.eval_temperature`, or where n > 1 `rollout.temperature`."""
    top_p: Fraction | None = None
    """`None`: `rollout.top_p`."""
    top_k: NonNegative | None = None
    """`None`: `rollout.top_k`."""
    max_completion_length: Positive | None = None
    """`None`: `rollout.max_completion_length`."""
    functions: tuple[RewardFunction, ...] | None = None
    """What rewards; `None`: `reward.functions`."""
    environments: tuple[EnvironmentClass, ...] | None = None
    """What answers between the policy's turns; `None`: section `environment`. If given, they stand
    for its classes, and its tools are left out; the rest of the section holds."""
    pass_threshold: float = 1.0
    """Reward from which on an answer passes, for pass@k."""
    answer_pattern: str | None = None
    """What the majority is of, for maj@k: a regular expression whose last match in the text of the
    last turn is taken, or its first group. `None`: that whole text."""
    steps: NonNegative = 0
    """Evaluate every so many versions of a run, and at its start and its end; 0: by
    `rhymeflow eval` only."""

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
                "steps: of held_out, the run's own suite, run.eval_steps says how often; give this "
                "one another name"
            )
        if self.options and self.source is None:
            raise ValueError("options: are of a suite's own source, and none is given")
        return self


class EvalConfig(Section):
    """Suites that `rhymeflow eval` evaluates a policy on, and a run itself on those with `steps`.
    Without any it is one, `held_out`: the run's held-out prompts, on which every run is evaluated
    (`run.eval_steps`)."""

    suites: tuple[EvalSuite, ...] = ()
    """Each is `{name: ..., source: ..., size: ..., n: ...}` and more (docs/evaluation.md)."""

    @model_validator(mode="after")
    def _have_names_of_their_own(self) -> EvalConfig:
        names = [each.name for each in self.suites]
        if len(names) > len(set(names)):
            raise ValueError(f"suites: two are named {max(names, key=names.count)!r}")
        return self
