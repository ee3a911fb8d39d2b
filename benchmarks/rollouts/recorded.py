"""Rollouts of a run, as flat arrays in one `.npz` file, in the order they were produced.

Holds true: responses of one group stand together; groups come in the order they were requested; a
rollout's `tokens` are all of the response, its stop token included. Imports numpy only, so that
other systems' sides read it too.

    for batch in load(path).batches(groups=16):   # what runs together
        for rollout in batch: rollout.prompt, rollout.epoch, rollout.tokens, rollout.reward ...
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

_NUMBERS = ("row", "epoch", "version", "sample", "noise_epoch", "group")


class Rollout(NamedTuple):
    """One response."""

    row: int
    """Of the prompt, in the data."""
    epoch: int
    version: int
    """Of the policy, when the response began."""
    sample: int
    """Its place in the group."""
    noise_epoch: int
    """The epoch that keyed its sampling noise; 0 in every epoch where noise rhymes."""
    group: int
    prompt: list[int]
    tokens: list[int]
    reward: float


@dataclass(frozen=True)
class Recording:
    """All rollouts of a run."""

    rollouts: list[Rollout]

    @property
    def num_tokens(self) -> int:
        """Of all responses."""
        return sum(len(rollout.tokens) for rollout in self.rollouts)

    def batches(self, groups: int) -> list[list[Rollout]]:
        """Rollouts of so many groups at a time; never of two epochs together."""
        batches: list[list[Rollout]] = []
        found: set[int] = set()
        for rollout in self.rollouts:
            is_full = rollout.group not in found and len(found) == groups
            if not batches or is_full or batches[-1][-1].epoch != rollout.epoch:
                batches.append([])
                found = set()
            found.add(rollout.group)
            batches[-1].append(rollout)
        return batches


def save(path: Path, rollouts: Iterable[Rollout]) -> None:
    """Write rollouts to `path`, in their order."""
    kept = list(rollouts)
    columns = {name: np.array([getattr(r, name) for r in kept], np.int64) for name in _NUMBERS}
    prompts, prompt_offsets = _flat([rollout.prompt for rollout in kept])
    tokens, offsets = _flat([rollout.tokens for rollout in kept])
    np.savez_compressed(
        path,
        **columns,
        reward=np.array([rollout.reward for rollout in kept]),
        prompts=prompts,
        prompt_offsets=prompt_offsets,
        tokens=tokens,
        offsets=offsets,
    )


def load(path: Path) -> Recording:
    """Read what `save` wrote."""
    with np.load(path) as data:
        columns = [data[name].tolist() for name in _NUMBERS]
        prompts = _lists(data["prompts"], data["prompt_offsets"])
        tokens = _lists(data["tokens"], data["offsets"])
        rows = zip(*columns, prompts, tokens, data["reward"].tolist(), strict=True)
        return Recording([Rollout(*row) for row in rows])


def _flat(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    return np.array([token for tokens in lists for token in tokens], np.int32), offsets


def _lists(flat: np.ndarray, offsets: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(flat, offsets[1:-1])]
