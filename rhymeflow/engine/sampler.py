"""From float32 logits to tokens and their log-probabilities.

Holds true: a row's token depends on its logits, its `Sampling` and its noise key only; the
distribution is `models.logits.shaped`, the learner's; the log-probability is that of the sampled
token under it (at temperature 0: under the untempered logits). Equal greatest logits go to the
smaller token at temperature 0. A sequence may sample several rows in one call: rows are told apart
by stream and position alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rhymeflow.engine import noise
from rhymeflow.engine.sequence import Sampling
from rhymeflow.models.logits import shaped


class Row(NamedTuple):
    """One token to sample: how, and with which noise."""

    sampling: Sampling
    stream: int
    position: int
    """In the response, from 0."""


def sample(logits_RV: Tensor, rows: list[Row]) -> tuple[list[int], list[float]]:
    """Sample one token per row of float32 logits; return tokens and log-probabilities (nats)."""
    assert logits_RV.dtype == torch.float32
    assert len(rows) == len(logits_RV)
    groups: dict[tuple[float, int, float], list[int]] = {}
    for place, row in enumerate(rows):
        how = (row.sampling.temperature, row.sampling.top_k, row.sampling.top_p)
        groups.setdefault(how, []).append(place)
    if len(groups) == 1:
        return _sample_alike(logits_RV, rows)
    tokens, logprobs = [0] * len(rows), [0.0] * len(rows)
    for places in groups.values():
        part = _sample_alike(logits_RV[places], [rows[place] for place in places])
        for place, token, logprob in zip(places, *part, strict=True):
            tokens[place], logprobs[place] = token, logprob
    return tokens, logprobs


def _sample_alike(logits_RV: Tensor, rows: list[Row]) -> tuple[list[int], list[float]]:
    """Sample rows that all have the first one's temperature, top-k and top-p."""
    how = rows[0].sampling
    x_RV = shaped(logits_RV, temperature=how.temperature, top_k=how.top_k, top_p=how.top_p)
    if how.temperature == 0.0:
        token_R = x_RV.argmax(1)
    else:
        streams, positions = [row.stream for row in rows], [row.position for row in rows]
        token_R = noise.draw(x_RV, noise.row_keys(streams, positions, x_RV.device))
    logprob_R = x_RV.gather(1, token_R[:, None])[:, 0] - x_RV.logsumexp(1)
    return token_R.tolist(), logprob_R.tolist()


__all__ = ["Row", "sample"]
