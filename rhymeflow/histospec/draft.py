"""What is proposed for one sequence, what came of it, and what names a shared index.

Loads no numba: messages carry these to processes that draft nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec


class Draft(NamedTuple):
    """Tokens that may come next: a tree, in an order in which parents stand before children."""

    tokens: list[int]
    parents: list[int]
    """For each token the place in `tokens` of the one before it; -1: it follows the sequence. A
    linear draft has parents -1, 0, 1, ..."""


NONE = Draft([], [])


@dataclass(slots=True)
class DraftStats:
    """Totals since the engine exists, over sequences that were ready to decode."""

    steps: int = 0
    """Pairs of a sequence and an iteration that generated a token of it."""
    generated: int = 0
    """Tokens generated in them: at least one each."""
    drafted: int = 0
    """Tokens proposed and verified."""
    accepted: int = 0
    """Of these, accepted."""
    seconds: float = 0.0
    """Time spent on finding drafts and indexing tokens."""
    saved_seconds: float = 0.0
    """Estimate: what the same tokens would have taken without drafts, less what they took."""


class IndexHandle(msgspec.Struct, frozen=True, array_like=True):
    """What another process needs to reach a shared index."""

    name: str
    num_blocks: int
    num_heads: int
    max_responses: int
