"""What a drafter was asked and answered in one iteration, until the engine says what it made.

Knows nothing of how proposals are found or weighed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rhymeflow.histospec.draft import NONE, Draft
from rhymeflow.histospec.expand import Proposals
from rhymeflow.histospec.timing import Curve


@dataclass(slots=True)
class Asked:
    """From `Drafter.propose` to `Drafter.observe`."""

    sequences: int
    other_rows: int
    kv_tokens: int
    seconds: float
    """Spent on it."""
    curve: Curve | None = None
    alone: Curve | None = None
    """The same without the other rows."""
    proposals: Proposals | None = None
    """None: there was no search."""
    lengths: NDArray[np.int64] | None = None
    """Tokens of each proposal that the engine was given."""
    expected: float = 0.0
    """Of them, how many were expected to be accepted."""
    made: int = 0
    """Tokens that came of sequences with a proposal, empty ones included."""
    weights: NDArray[np.float64] | None = None
    """What a token of each sequence is worth; None: 1."""
    worth: float = 0.0
    """Of the tokens that came, in tokens of a batch without weights."""

    @property
    def is_plain(self) -> bool:
        """Whether the engine was given no draft at all."""
        return self.lengths is None or not self.lengths.any()

    def drafts(self) -> list[Draft]:
        """The chosen part of each proposal."""
        assert self.proposals is not None
        assert self.lengths is not None
        chosen = np.arange(self.proposals.tokens.shape[1]) < self.lengths[:, None]
        tokens = self.proposals.tokens[chosen].tolist()
        parents = self.proposals.parents[chosen].tolist()
        drafts, start = [], 0
        for length in self.lengths.tolist():
            end = start + length
            drafts.append(Draft(tokens[start:end], parents[start:end]) if length else NONE)
            start = end
        return drafts


__all__ = ["Asked"]
