"""From logits to tokens and their log-probabilities.

A row's token depends only on its logits, its `Sampling` and its noise key. Log-probabilities are
under the distribution sampled from (`models.logits.shaped`, as in the learner). At temperature 0
the token is the argmax, the smallest if several are equal, and the distribution is untempered."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rhymeflow.engine.base import Sampling
from rhymeflow.engine.native import noise
from rhymeflow.models.logits import shaped

CHUNK_BYTES = 1 << 28
"""Bytes of float32 logits that are sampled from at a time: drafts can have thousands of rows."""

Shaping = tuple[float, int, float]  # temperature, top-k and top-p


class Draws(NamedTuple):
    """One sequence's tokens to sample, one row of logits each."""

    sampling: Sampling
    stream: int
    positions: list[int]  # each token's position in the response, from 0


def sampling_bytes(rows: int, vocabulary: int, bytes_per_logit: int, *, truncates: bool) -> int:
    """Return the most memory that sampling takes on a GPU: the logits, and what is computed of one
    chunk. `truncates`: by top-k or top-p, which sort it. Counted in `tests/engine/test_sampler.py`.
    """
    chunk = min(rows, _chunk_rows(vocabulary))
    places = min((noise.ROOM_PER_ROW * chunk + noise.ROOM) * noise.BLOCK, chunk * vocabulary)
    of_chunk = 65 * places + chunk * vocabulary * (40 if truncates else 5)
    return rows * vocabulary * bytes_per_logit + of_chunk


def sample(logits_RV: Tensor, draws: list[Draws]) -> tuple[list[int], list[float]]:
    """Sample one token per row of logits; return tokens and log-probabilities (nats)."""
    counts = [len(draw.positions) for draw in draws]
    ends = list(accumulate(counts))
    assert ends[-1] == len(logits_RV)
    positions = [position for draw in draws for position in draw.positions]
    stream_R = np.array([draw.stream for draw in draws], dtype=np.uint64).repeat(counts)
    keys_R = noise.row_keys(stream_R, positions, logits_RV.device)
    rows_of: dict[Shaping, list[int]] = {}
    for (how, _, _), count, end in zip(draws, counts, ends, strict=True):
        shaping = how.temperature, how.top_k, how.top_p
        rows_of.setdefault(shaping, []).extend(range(end - count, end))
    if len(rows_of) == 1:
        return _fetched(logits_RV, keys_R, shaping)
    tokens, logprobs = [0] * ends[-1], [0.0] * ends[-1]
    for shaping, rows in rows_of.items():
        found = _fetched(logits_RV, keys_R, shaping, rows)
        for row, token, logprob in zip(rows, *found, strict=True):
            tokens[row], logprobs[row] = token, logprob
    return tokens, logprobs


def drawn(
    logits_RV: Tensor, keys_R: Tensor, shaping: Shaping, waits: bool, rows: list[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Return tokens, int64, and their log-probabilities, float32, of these rows (None: all), in
    chunks. For `waits` see `noise.draw`."""
    count = len(logits_RV) if rows is None else len(rows)
    # Of about equal sizes: torch may sum a single row in another order, with several threads.
    num_chunks = -(-count // _chunk_rows(logits_RV.shape[1]))
    parts = []
    for i in range(num_chunks):
        part = slice(count * i // num_chunks, count * (i + 1) // num_chunks)
        of = part if rows is None else rows[part]
        parts.append(_drawn_at_once(logits_RV[of], keys_R[of], shaping, waits))
    if num_chunks == 1:
        return parts[0]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _chunk_rows(vocabulary: int) -> int:
    return max(2, CHUNK_BYTES // (4 * vocabulary))


def _drawn_at_once(
    logits_RV: Tensor, keys_R: Tensor, shaping: Shaping, waits: bool
) -> tuple[Tensor, Tensor]:
    temperature, top_k, top_p = shaping
    x_RV = shaped(logits_RV, temperature=temperature, top_k=top_k, top_p=top_p)
    token_R = x_RV.argmax(1) if temperature == 0.0 else noise.draw(x_RV, keys_R, waits=waits)
    place_R = token_R if waits else token_R.clamp(min=0)  # of `UNKNOWN`, any
    return token_R, x_RV.gather(1, place_R[:, None])[:, 0] - x_RV.logsumexp(1)


def _fetched(
    logits_RV: Tensor, keys_R: Tensor, shaping: Shaping, rows: list[int] | None = None
) -> tuple[list[int], list[float]]:
    """Return `drawn` on the host, which waits once, and again only if a token is not known."""
    for waits in (logits_RV.device.type == "cpu", True):
        token_R, logprob_R = drawn(logits_RV, keys_R, shaping, waits, rows)
        tokens: list[int] = token_R.tolist()
        if noise.UNKNOWN not in tokens:
            break
    return tokens, logprob_R.tolist()
