"""From float32 logits to tokens and their log-probabilities.

A row's token depends only on its logits, its `Sampling` and its noise key. Log-probabilities are
under the distribution sampled from (`models.logits.shaped`, as in the learner). At temperature 0
the token is the argmax, the smallest if several are equal, and the distribution is untempered.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rhymeflow.engine.base import Sampling
from rhymeflow.engine.native import noise
from rhymeflow.models.logits import shaped


class Draws(NamedTuple):
    """One sequence's tokens to sample, one row of logits each."""

    sampling: Sampling
    stream: int
    positions: list[int]
    """Each token's position in the response, from 0."""


def sample(logits_RV: Tensor, draws: list[Draws]) -> tuple[list[int], list[float]]:
    """Sample one token per row of float32 logits; return tokens and log-probabilities (nats)."""
    assert logits_RV.dtype == torch.float32
    groups: dict[tuple[float, int, float], list[int]] = {}
    for i, draw in enumerate(draws):
        shaping = (draw.sampling.temperature, draw.sampling.top_k, draw.sampling.top_p)
        groups.setdefault(shaping, []).append(i)
    if len(groups) == 1:
        return _sample_alike(logits_RV, draws)
    ends = list(accumulate(len(draw.positions) for draw in draws))
    assert ends[-1] == len(logits_RV)
    tokens, logprobs = [0] * len(logits_RV), [0.0] * len(logits_RV)
    for members in groups.values():
        rows = [row for i in members for row in range(ends[i] - len(draws[i].positions), ends[i])]
        part = _sample_alike(logits_RV[rows], [draws[i] for i in members])
        for row, token, logprob in zip(rows, *part, strict=True):
            tokens[row], logprobs[row] = token, logprob
    return tokens, logprobs


def _sample_alike(logits_RV: Tensor, draws: list[Draws]) -> tuple[list[int], list[float]]:
    """Sample rows that have the same temperature, top-k and top-p."""
    sampling = draws[0].sampling
    temperature, top_k, top_p = sampling.temperature, sampling.top_k, sampling.top_p
    x_RV = shaped(logits_RV, temperature=temperature, top_k=top_k, top_p=top_p)
    if temperature == 0.0:
        token_R = x_RV.argmax(1)
    else:
        positions = [position for draw in draws for position in draw.positions]
        assert len(positions) == len(logits_RV)
        stream_D = np.array([draw.stream for draw in draws], dtype=np.uint64)
        stream_R = stream_D.repeat([len(draw.positions) for draw in draws])
        token_R = noise.draw(x_RV, noise.row_keys(stream_R, positions, x_RV.device))
    logprob_R = x_RV.gather(1, token_R[:, None])[:, 0] - x_RV.logsumexp(1)
    return token_R.tolist(), logprob_R.tolist()
