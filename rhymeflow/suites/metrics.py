"""Names of suites' figures among a run's metrics, and which of them a checkpoint can be best by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rhymeflow.config import Config
from rhymeflow.core.types import HELD_OUT, SuiteName
from rhymeflow.errors import UserError, nearest
from rhymeflow.suites.figures import counted
from rhymeflow.suites.suite import of_run

REWARD = "eval/reward"
"""The mean held-out reward, which is `eval/held_out/avg@1` too."""


def metrics_of(suite: SuiteName, figures: Mapping[str, float]) -> dict[str, float]:
    """Return a suite's figures by their names among a run's metrics."""
    has_reward = suite == HELD_OUT and "avg@1" in figures  # else no answer could be judged
    reward = {REWARD: figures["avg@1"]} if has_reward else {}
    return reward | {f"eval/{suite}/{name}": value for name, value in figures.items()}


def figures_of(metrics: Mapping[str, Any]) -> dict[SuiteName, dict[str, float]]:
    """Return the figures that a row of metrics has of each suite but the held-out prompts."""
    found: dict[SuiteName, dict[str, float]] = {}
    for name, value in metrics.items():
        suite, _, figure = name.removeprefix("eval/").rpartition("/")
        if name.startswith("eval/") and suite not in ("", HELD_OUT) and suite[:7] != "logged/":
            found.setdefault(suite, {})[figure] = value
    # Others were logged by a reward function.
    return {suite: each for suite, each in found.items() if any(map(_is_mean, each))}


def _is_mean(figure: str) -> bool:
    return figure.startswith("avg@")


def headlines(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return what is shown first of each of them, by what it is called. That is avg@n and, where
    there are several answers, pass@n."""
    shown: dict[str, float] = {}
    for suite, figures in figures_of(metrics).items():
        n = next(filter(_is_mean, figures)).removeprefix("avg@")
        for name in (f"avg@{n}", *([f"pass@{n}"] if n != "1" else [])):
            if name in figures:
                shown[f"{suite} {name}"] = figures[name]
    return shown


def check_best_metric(config: Config) -> None:
    """Raise `UserError` unless a run of `config` finds the metric that its best checkpoint has most
    of. Where nothing is evaluated, the default means that no checkpoint is the best."""
    given, names = config.run.best_metric, [REWARD]
    for suite in of_run(config):
        figures = [f"avg@{suite.n}", *(f"pass@{k}" for k in counted(suite.n))]
        figures += [f"maj@{suite.n}"] if suite.n > 1 else []
        names += [f"eval/{suite.name}/{figure}" for figure in figures]
    if given not in names:
        raise UserError(
            f"run.best_metric: given {given!r}, and this run has {', '.join(names)}"
            f"{nearest(given, names)}"
        )
