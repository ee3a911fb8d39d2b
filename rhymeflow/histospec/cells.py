"""What a proposed token is judged by: into which cell of the acceptance chances it falls.

A cell is (where the text comes from, how long the match is, how agreed the candidates are). Whoever
counts what became of drafts keeps one chance a cell.
"""

from __future__ import annotations

import numpy as np

from rhymeflow.histospec.chances import Chances

NUM_KINDS = 4
"""The text is of another prompt, of the same prompt, the sequence's own, aligned (of the same
prompt, sample and noise, at the same position)."""

NUM_SHARES = 8
"""Share of the votes, smoothed by one vote that nobody gets, in eighths."""

_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # least match of each bucket
NUM_LENGTHS = len(_LENGTHS)

SHAPE = (NUM_SHARES, NUM_LENGTHS, NUM_KINDS)
"""Dimensions of the table of chances, the most telling first."""

NUM_CELLS = NUM_SHARES * NUM_LENGTHS * NUM_KINDS

NUMBERS = np.arange(NUM_CELLS, dtype=np.int32).reshape(SHAPE)
"""int32 [shares, lengths, kinds]: the numbers of the cells."""

LENGTH_BUCKETS = (np.searchsorted(_LENGTHS, np.arange(33), side="right") - 1).astype(np.int64)
"""int64 [33]: the bucket of each matched length."""


def cell(kind: int, matched: int, share: float) -> int:
    """Return the cell of a token (`expand.py` has the same, compiled)."""
    agreed = min(int(share * NUM_SHARES), NUM_SHARES - 1)
    return int(NUMBERS[agreed, LENGTH_BUCKETS[min(matched, 32)], kind])


def first_chances() -> Chances:
    """Chances that begin with the share of the votes.

    Cells with the same share lend each other what they know, and those of one kind more so.
    """
    share, _, kind = np.unravel_index(np.arange(NUM_CELLS), SHAPE)
    groups = np.stack([share, share * NUM_KINDS + kind, np.arange(NUM_CELLS)])
    return Chances(groups, (share + 0.5) / NUM_SHARES)


__all__ = [
    "LENGTH_BUCKETS",
    "NUMBERS",
    "NUM_CELLS",
    "NUM_KINDS",
    "NUM_LENGTHS",
    "NUM_SHARES",
    "SHAPE",
    "cell",
    "first_chances",
]
