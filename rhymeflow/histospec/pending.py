"""What a drafter proposed in one iteration, kept until the engine says what it generated.

Knows nothing of how proposals are found or weighed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rhymeflow.histospec.build_draft import Proposals
from rhymeflow.histospec.draft import NONE, Draft


@dataclass(slots=True)
class Pending:
    """From `Drafter.propose` to `Drafter.observe`."""

    sequences: int
    other_rows: int
    kv_tokens: int
    seconds: float = 0.0
    """Spent on it."""
    proposals: Proposals | None = None
    """None: there was no search."""
    lengths: NDArray[np.int64] | None = None
    """Tokens of each proposal that the engine was given."""
    generated: int = 0
    """Tokens that came of sequences with a proposal, empty ones included."""

    @property
    def num_drafted(self) -> int:
        """Tokens that the engine was given to verify."""
        return 0 if self.lengths is None else int(self.lengths.sum())

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


__all__ = ["Pending"]
