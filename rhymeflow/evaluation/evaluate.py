"""`rhymeflow eval`: a model on suites; figures, a table and JSON.

Holds true: the weights are loaded once prompts, environments and reward functions of the first
suite are there, and kept for all.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rhymeflow.config import Config
from rhymeflow.core.types import CUT
from rhymeflow.errors import UserError
from rhymeflow.evaluation.answer import Answer
from rhymeflow.evaluation.answering import answer_suite
from rhymeflow.evaluation.policy import Policy
from rhymeflow.suites.figures import Judged, figures, said
from rhymeflow.suites.suite import Suite, chosen

PROGRESS_SECONDS = 1.0
"""How often a terminal is told how far it is."""


class Result(NamedTuple):
    """What came of a suite."""

    suite: Suite
    num_prompts: int
    figures: dict[str, float]
    seconds: float


def evaluate(config: Config, names: Sequence[str] = ()) -> list[Result]:
    """Evaluate the model of `config` on its suites, or on those named.

    Raises:
        UserError: something cannot be had or used, or an environment or reward function fails.
    """
    suites = chosen(config, names)
    policy = Policy(config)
    return [_evaluate(policy, suite) for suite in suites]


def _evaluate(policy: Policy, suite: Suite) -> Result:
    began = time.perf_counter()
    progress = _Progress(suite.name)
    try:
        prompts = answer_suite(policy, suite, progress)
    finally:
        progress.end()
    judged = [[_judged(policy, suite, answer) for answer in answers] for answers in prompts]
    found = figures(judged, suite.suite.pass_threshold)
    return Result(suite, len(prompts), found, time.perf_counter() - began)


def _judged(policy: Policy, suite: Suite, answer: Answer) -> Judged:
    text = policy.tokenizer.decode(answer.sampled[-1], skip_special_tokens=True)
    assert isinstance(text, str)
    assert answer.reward is not None
    vote = said(text, suite.suite.answer_pattern)
    return Judged(answer.reward, answer.num_sampled, answer.reason in CUT, vote)


# -- what is shown ---------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """Return one line for each suite; of pass@k the largest k."""
    rows = [("suite", "prompts", "k", "avg@k", "pass@k", "maj@k", "mean_length", "clipped_ratio")]
    for suite, num_prompts, found, _ in results:
        n = suite.n
        rows.append(
            (
                suite.name,
                f"{num_prompts:,}",
                str(n),
                _number(found[f"avg@{n}"]),
                _number(found[f"pass@{n}"]),
                _number(found.get(f"maj@{n}")),
                f"{found['mean_length']:,.1f}",
                _number(found["clipped_ratio"]),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            each.rjust(width) if place else each.ljust(width)
            for place, (each, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def as_json(config: Config, results: Sequence[Result]) -> dict[str, Any]:
    """Return all figures, and how they were made."""
    return {
        "model": config.model.name,
        "seed": config.run.seed,
        "suites": {each.suite.name: _suite_as_json(each) for each in results},
    }


def _suite_as_json(result: Result) -> dict[str, Any]:
    rollout = result.suite.config.rollout
    return {
        "prompts": result.num_prompts,
        "n": result.suite.n,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "max_completion_length": rollout.max_completion_length,
        "pass_threshold": result.suite.suite.pass_threshold,
        **result.figures,
        "seconds": round(result.seconds, 3),
    }


def write(path: Path, found: dict[str, Any]) -> None:
    """Write the figures to a file; `UserError` if that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written: {error}") from None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


class _Progress:
    """Says on a terminal how many answers have their reward, in a line that it takes back."""

    def __init__(self, name: str) -> None:
        self._name, self._width = name, 0
        self._next = time.monotonic() + PROGRESS_SECONDS

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next or not sys.stderr.isatty():
            return
        self._next = now + PROGRESS_SECONDS
        line = f"{self._name}: {done:,} of {total:,} answers"
        print(f"\r{line.ljust(self._width)}", end="", file=sys.stderr, flush=True)
        self._width = len(line)

    def end(self) -> None:
        if self._width:
            print(f"\r{' ' * self._width}\r", end="", file=sys.stderr, flush=True)


__all__ = ["Result", "as_json", "evaluate", "table", "write"]
