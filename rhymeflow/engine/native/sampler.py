"""From float32 logits to tokens and their log-probabilities.

A row's token depends on its logits, its `Sampling` and its noise key only. The log-probability is
that of the sampled token under the distribution (`models.logits.shaped`, the learner's), at
temperature 0 under the untempered logits, where equal greatest ones go to the smaller token.
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
    """One sequence's tokens to sample, a row each: how, and with which noise."""

    sampling: Sampling
    stream: int
    positions: list[int]
    """In the response, from 0."""


def sample(logits_RV: Tensor, draws: list[Draws]) -> tuple[list[int], list[float]]:
    """Sample one token per row of float32 logits; return tokens and log-probabilities (nats)."""
    assert logits_RV.dtype == torch.float32
    groups: dict[tuple[float, int, float], list[int]] = {}
    for i, draw in enumerate(draws):
        how = (draw.sampling.temperature, draw.sampling.top_k, draw.sampling.top_p)
        groups.setdefault(how, []).append(i)
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
    """Sample rows that all have the first one's temperature, top-k and top-p."""
    how = draws[0].sampling
    x_RV = shaped(logits_RV, temperature=how.temperature, top_k=how.top_k, top_p=how.top_p)
    if how.temperature == 0.0:
        token_R = x_RV.argmax(1)
    else:
        positions = [position for draw in draws for position in draw.positions]
        assert len(positions) == len(logits_RV)
        stream_D = np.array([draw.stream for draw in draws], dtype=np.uint64)
        stream_R = stream_D.repeat([len(draw.positions) for draw in draws])
        token_R = noise.draw(x_RV, noise.row_keys(stream_R, positions, x_RV.device))
    logprob_R = x_RV.gather(1, token_R[:, None])[:, 0] - x_RV.logsumexp(1)
    return token_R.tolist(), logprob_R.tolist()
