"""Rollouts of a run, as flat arrays in one `.npz` file, in the order they were generated.

Responses of one group stand together; groups come in the order they were requested; a rollout's
`tokens` are all of the response, its stop token included.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rhymeflow.engine.base import NoiseKey, Request, Sampling
from rhymeflow.histospec.index import PROMPT_TAIL, Index


class Rollout(NamedTuple):
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


def batches(rollouts: Iterable[Rollout], groups: int) -> list[list[Rollout]]:
    """Rollouts of so many groups at a time; never of two epochs together."""
    found: list[list[Rollout]] = []
    for _, of_epoch in itertools.groupby(rollouts, lambda one: one.epoch):
        whole = [list(each) for _, each in itertools.groupby(of_epoch, lambda one: one.group)]
        for first in range(0, len(whole), groups):
            found.append([one for each in whole[first : first + groups] for one in each])
    return found


def save(path: Path, rollouts: Iterable[Rollout]) -> None:
    columns: dict[str, Any] = dict(zip(Rollout._fields, zip(*rollouts, strict=True), strict=True))
    for name in ("prompt", "tokens"):
        lists = columns[name]
        columns[f"{name}_ends"] = np.cumsum([len(each) for each in lists])
        columns[name] = np.array([token for each in lists for token in each], np.int32)
    arrays: dict[str, Any] = {name: np.asarray(values) for name, values in columns.items()}
    np.savez_compressed(path, **arrays)


def load(path: Path) -> list[Rollout]:
    with np.load(path) as data:
        columns = {name: data[name].tolist() for name in Rollout._fields}
        for name in ("prompt", "tokens"):
            parts = np.split(data[name], data[f"{name}_ends"][:-1])
            columns[name] = [part.tolist() for part in parts]
    return [Rollout(*row) for row in zip(*columns.values(), strict=True)]


def empty_history(rollouts: Sequence[Rollout]) -> Index:
    """An index with room for these and a little more."""
    tokens = sum(len(rollout.tokens) + PROMPT_TAIL for rollout in rollouts)
    return Index(max_tokens=max(tokens, 1024), max_responses=max(len(rollouts), 16))


def remember(history: Index, rollouts: Sequence[Rollout]) -> None:
    """Enter finished responses with their rewards."""
    for one in rollouts:
        noise = {"sample": one.sample, "noise_epoch": one.noise_epoch}
        enter(history, one.prompt, one.tokens, one.reward, **noise)


def enter(
    history: Index,
    prompt: list[int],
    tokens: Sequence[int],
    reward: float,
    *,
    sample: int,
    noise_epoch: int = 0,
) -> None:
    """Enter one finished response."""
    response = history.begin(prompt, sample=sample, noise_epoch=noise_epoch)
    history.extend(response, tokens)
    history.finish(response, reward)


def requests_of(request: dict[str, Any]) -> list[Request]:
    """One request for each prompt that `peers/vllm_driver.py` is asked for."""
    found = []
    asked = zip(request["prompts"], request["lengths"], request["names"], strict=True)
    for prompt, length, (row, sample) in asked:
        key = NoiseKey(1000 + row, request["noise_epoch"], sample)
        how = Sampling(request["temperature"], 1.0, 0, length, frozenset())
        found.append(Request(len(found), prompt, key, how))
    return found
