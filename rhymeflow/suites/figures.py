"""Figures of a suite's answers: avg@k, pass@k, maj@k and lengths, as means over prompts, and their
names among a run's metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhymeflow.core.types import HELD_OUT, SuiteName


@dataclass(frozen=True)
class JudgedAnswer:
    """What figures need of an answer."""

    reward: float
    length: int
    is_cut: bool
    said: Hashable
    """Its vote in maj@k."""


def pass_at_k(num_answers: int, num_passed: int, k: int) -> float:
    """Return the chance that of `k` answers, drawn without replacement, at least one passes.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, section 2.1): 1 - C(n-c, k) /
    C(n, k), for n answers of which c passed.
    """
    assert 0 < k <= num_answers
    return 1.0 - math.comb(num_answers - num_passed, k) / math.comb(num_answers, k)


def majority(answers: Sequence[JudgedAnswer]) -> float:
    """The mean reward of the answers with the most frequent vote; of equally frequent ones,
    of the first: samples are exchangeable, so that favours none."""
    said: dict[Hashable, list[float]] = {}
    for answer in answers:
        said.setdefault(answer.said, []).append(answer.reward)
    won = max(said.values(), key=len)  # the first of the largest
    return sum(won) / len(won)


def figures(
    prompts: Sequence[Sequence[JudgedAnswer | None]], pass_threshold: float
) -> dict[str, float]:
    """The figures by name, of the answers to each prompt, as many to each. Those that could not be
    judged are None: `failed` counts them, and the figures are of the others; pass@k of prompts with
    at least k."""
    n = len(prompts[0])
    assert all(len(answers) == n for answers in prompts)
    there = [[each for each in answers if each is not None] for answers in prompts]
    there = [answers for answers in there if answers]
    every = [answer for answers in there for answer in answers]
    found = {"failed": float(lost)} if (lost := n * len(prompts) - len(every)) else {}
    if not every:
        return found
    found[f"avg@{n}"] = _mean([each.reward for each in every])
    for k in counted(n):
        chances = [
            pass_at_k(len(answers), sum(each.reward >= pass_threshold for each in answers), k)
            for answers in there
            if len(answers) >= k
        ]
        if chances:
            found[f"pass@{k}"] = _mean(chances)
    if n > 1:
        found[f"maj@{n}"] = _mean([majority(answers) for answers in there])
    found["mean_length"] = _mean([each.length for each in every])
    found["clipped_ratio"] = _mean([each.is_cut for each in every])
    return found


def counted(n: int) -> list[int]:
    """The k of pass@k, of `n` answers: powers of two, and `n`."""
    return sorted({2**power for power in range(n.bit_length()) if 2**power <= n} | {n})


def said(text: str, pattern: str | None) -> str:
    """Return a text's vote, without blanks around it: the pattern's last match or its first group;
    without a pattern the whole text."""
    if pattern is None:
        return text.strip()
    *_, match = (None, *re.finditer(pattern, text))
    if match is None:
        return ""
    return ((match[1] if match.re.groups else match[0]) or "").strip()


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# -- names -----------------------------------------------------------------------------------------

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
