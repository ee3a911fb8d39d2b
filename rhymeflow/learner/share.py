"""What each of many ranks computes of an optimizer step: shares of nearly equal numbers of tokens.

Samples are cut, in their order, into one run for each rank, so groups stay together but for those
at a cut, and what they begin with is computed once. A sample goes to the rank in whose share of the
tokens its middle lies; so no share is further from the mean than one sample is long, and than what
the samples after a cut have in common with those before it.

Holds true: every sample is in exactly one rank's rows; all ranks have the same number of rows, for
their collectives are part of each forward and backward pass: who has fewer gets empty ones; with
one rank, the rows are those of `packing.pack`. A pure function of the batch: ranks that read the
same batch need not talk about it. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rhymeflow.learner.packing import PackedRow, added, empty_row, pack
from rhymeflow.learner.sample import Sample


def share(
    samples: Sequence[Sample], members: Sequence[int], max_tokens: int, rank: int, num_ranks: int
) -> list[PackedRow]:
    """Rows of at most `max_tokens` tokens for `rank`, of `samples[i]` for `i` in `members`."""
    if num_ranks == 1:
        return pack(samples, members, max_tokens)
    rows = [pack(samples, part, max_tokens) for part in cut(samples, members, num_ranks)]
    mine = rows[rank]
    return mine + [empty_row()] * (max(map(len, rows)) - len(mine))


def cut(samples: Sequence[Sample], members: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Members by rank, in order."""
    tokens_N = np.array(added(samples, members), dtype=np.int64)
    end_N = tokens_N.cumsum()
    total = int(end_N[-1]) if len(members) else 1
    rank_N = ((end_N - tokens_N / 2) * num_ranks / max(total, 1)).astype(int)
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    for member, rank in zip(members, rank_N, strict=True):
        parts[min(int(rank), num_ranks - 1)].append(member)
    return parts


__all__ = ["cut", "share"]
