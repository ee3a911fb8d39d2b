"""Figures of a suite's answers (avg@k, pass@k, maj@k, lengths), and their names as metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any

from rhymeflow.core.types import HELD_OUT, SuiteName


@dataclass(frozen=True)
class JudgedAnswer:
    """The properties of an answer that figures are computed from."""

    reward: float
    length: int  # in tokens
    is_cut: bool
    vote: Hashable  # in maj@k


def pass_at_k(num_answers: int, num_passed: int, k: int) -> float:
    """Return the probability that at least one of `k` answers, drawn without replacement, passes.
    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, section 2.1): 1 - C(n-c, k) / C(n,
    k), for n answers of which c passed."""
    assert 0 < k <= num_answers
    return 1.0 - math.comb(num_answers - num_passed, k) / math.comb(num_answers, k)


def majority(answers: Sequence[JudgedAnswer]) -> float:
    """Return the mean reward of the answers with the most frequent vote. A tie goes to the first
    vote: samples are exchangeable, so that favours none."""
    rewards_by_vote: dict[Hashable, list[float]] = {}
    for answer in answers:
        rewards_by_vote.setdefault(answer.vote, []).append(answer.reward)
    rewards = max(rewards_by_vote.values(), key=len)  # the first of the largest
    return sum(rewards) / len(rewards)


def figures(
    prompts: Sequence[Sequence[JudgedAnswer | None]], pass_threshold: float
) -> dict[str, float]:
    """Return figures by name. `prompts` has the answers to each prompt, equally many to each; an
    answer that could not be judged is None: `failed` counts these, and the other figures leave them
    out. pass@k is the mean over prompts with at least k judged answers."""
    n = len(prompts[0])
    assert all(len(answers) == n for answers in prompts)
    judged = [[answer for answer in answers if answer is not None] for answers in prompts]
    judged = [answers for answers in judged if answers]
    every = [answer for answers in judged for answer in answers]
    result = {"failed": float(lost)} if (lost := n * len(prompts) - len(every)) else {}
    if not every:
        return result
    result[f"avg@{n}"] = _mean([answer.reward for answer in every])
    if len(judged) > 1:  # prompts are drawn, and answers to one of them are alike
        means = [_mean([answer.reward for answer in answers]) for answers in judged]
        result["stderr"] = stdev(means) / math.sqrt(len(means))
    for k in ks_of_pass(n):
        chances = [
            pass_at_k(len(answers), sum(a.reward >= pass_threshold for a in answers), k)
            for answers in judged
            if len(answers) >= k
        ]
        if chances:
            result[f"pass@{k}"] = _mean(chances)
    if n > 1:
        result[f"maj@{n}"] = _mean([majority(answers) for answers in judged])
    result["mean_length"] = _mean([answer.length for answer in every])
    result["clipped_ratio"] = _mean([answer.is_cut for answer in every])
    return result


def ks_of_pass(n: int) -> list[int]:
    """Return the values of k for pass@k with `n` answers: powers of two, and `n`."""
    return sorted({2**power for power in range(n.bit_length()) if 2**power <= n} | {n})


def vote_of(text: str, pattern: str | None) -> str:
    """Return a text's vote, stripped: the pattern's last match, or that match's first group if the
    pattern has one; the whole text without a pattern; empty without a match."""
    if pattern is None:
        return text.strip()
    *_, match = (None, *re.finditer(pattern, text))
    if match is None:
        return ""
    return ((match[1] if match.re.groups else match[0]) or "").strip()


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


OF_FUNCTION = "reward_"
"""Before a reward function's name, the name of its mean reward over a suite's answers."""


def named(rewards: Mapping[str, float]) -> dict[str, float]:
    """Return figures of reward functions, by function; {} if one function is all there is."""
    return {OF_FUNCTION + name: mean for name, mean in rewards.items() if len(rewards) > 1}


# -- names -----------------------------------------------------------------------------------------

REWARD = "eval/reward"  # the mean held-out reward, which is also `eval/held_out/avg@1`
STDERR = f"eval/{HELD_OUT}/stderr"  # its standard error, over prompts


def metrics_of(suite: SuiteName, figures: Mapping[str, float]) -> dict[str, float]:
    """Return a suite's figures by their names as metrics of a run."""
    has_reward = suite == HELD_OUT and "avg@1" in figures  # else no answer could be judged
    reward = {REWARD: figures["avg@1"]} if has_reward else {}
    return reward | {f"eval/{suite}/{name}": value for name, value in figures.items()}


def figures_of(metrics: Mapping[str, Any]) -> dict[SuiteName, dict[str, float]]:
    """Return the figures of each suite in a row of metrics, without the held-out prompts'."""
    suites: dict[SuiteName, dict[str, float]] = {}
    for name, value in metrics.items():
        suite, _, figure = name.removeprefix("eval/").rpartition("/")
        if name.startswith("eval/") and suite not in ("", HELD_OUT) and suite[:7] != "logged/":
            suites.setdefault(suite, {})[figure] = value
    # Names without avg@k were logged by a reward function.
    return {suite: figures for suite, figures in suites.items() if any(map(_is_mean, figures))}


def _is_mean(figure: str) -> bool:
    return figure.startswith("avg@")


def headlines(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return each suite's main figures, by suite and name: avg@n and, if n > 1, pass@n."""
    shown: dict[str, float] = {}
    for suite, figures in figures_of(metrics).items():
        n = next(filter(_is_mean, figures)).removeprefix("avg@")
        for name in (f"avg@{n}", *([f"pass@{n}"] if n != "1" else [])):
            if name in figures:
                shown[f"{suite} {name}"] = figures[name]
    return shown
