"""Drafts, their statistics, and the handle of a shared index.

Imports no numba: processes that draft nothing receive these in messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec


class Draft(NamedTuple):
    """A tree of tokens that may come next, parents before children."""

    tokens: list[int]
    parents: list[int]
    """For each token the index of its parent; -1: it follows the sequence. A linear draft has
    parents -1, 0, 1, ..."""


NONE = Draft([], [])


@dataclass(slots=True)
class DraftStats:
    """Totals over an engine's lifetime, of sequences that were ready to decode."""

    steps: int = 0  # number of pairs of a sequence and an iteration that generated tokens of it
    generated: int = 0  # tokens generated in these steps, at least one each
    drafted: int = 0  # tokens proposed and verified
    accepted: int = 0  # drafted tokens that were accepted
    seconds: float = 0.0  # spent on finding drafts and indexing tokens
    saved_seconds: float = 0.0
    """Estimated seconds that the same tokens would have taken without drafts, less those taken."""


class IndexHandle(msgspec.Struct, frozen=True, array_like=True):
    """The name and sizes by which another process maps a shared index."""

    name: str
    num_blocks: int
    num_heads: int
    max_responses: int
