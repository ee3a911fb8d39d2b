"""Recorded rollouts as an index to draft from."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.rollouts.recorded import Rollout
from rhymeflow.histospec.index import Index, prompt_key

PROMPT_TAIL = 16
"""Tokens of the prompt that stand before a response; an index keeps as many as it wants."""


def empty_history(rollouts: Sequence[Rollout]) -> Index:
    """An index with room for these and a little more."""
    tokens = sum(len(rollout.tokens) + PROMPT_TAIL for rollout in rollouts)
    return Index(max_tokens=max(tokens, 1024), max_responses=max(len(rollouts), 16))


def remember(history: Index, rollouts: Sequence[Rollout]) -> None:
    """Enter finished responses with their rewards."""
    for rollout in rollouts:
        response = history.begin(
            prompt_key(rollout.prompt),
            rollout.prompt[-PROMPT_TAIL:],
            sample=rollout.sample,
            noise_epoch=rollout.noise_epoch,
            version=rollout.version,
        )
        history.extend(response, rollout.tokens)
        history.finish(response, rollout.reward)
