"""How far a sequence's proposals are to be believed, by how it followed them so far.

Chances are learned by what is known of a drafted token, whoever it is drafted for. But a response
that has left what was proposed for it leaves it again sooner than another one: where most sequences
say what history says, the few that do not are offered the same sure words and refuse them. So the
conditional chance of each proposed token is multiplied by the ratio of what came true to what was
expected, for sequences in the same state and chances about as large.

States: just begun; has followed what was proposed from the beginning; went on without proposals,
so that nobody knows; left one within the last few tokens; left one longer ago. A sequence in one of
the last three is trusted less to begin with.

What was chosen to be verified is counted besides: what looks best of much that is uncertain comes
true less often than it looks, and siblings are wrong together. `credit` is the share of the tokens
expected of it that came, and begins below 1.

Holds true: all proposed tokens whose parent came true are learned from, verified or not, so the
ratios by state do not depend on what is chosen; a reach is never more than its parent's.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhymeflow.histospec.expand import Proposals

_BEGUN, _FOLLOWS, _UNKNOWN, _LATELY, _ONCE = range(5)
_FIRST = np.array([1.0, 1.0, 0.8, 0.7, 0.8])
"""The ratio by state as long as nothing is known."""
_LATE = 4
"""Tokens after which leaving is no longer lately."""
_LEVELS = 12
_STRENGTH = 4.0
"""Tokens that it counts for."""
_MEMORY = 1000.0
"""Tokens after which older ones fade."""

_CREDIT = 0.85
_CREDIT_STRENGTH = 20.0
"""Tokens that it counts for."""
_CREDIT_FADE = 0.99
"""Per search: a bad time is not held against drafts for ever."""

Ints = NDArray[np.int64]


class Trust:
    """The states of sequences by handle, and what each state's proposals were worth."""

    def __init__(self, max_sequences: int) -> None:
        self._since = np.zeros(max_sequences, np.int64)
        """Tokens since the sequence left a proposal; -1 - state: it did not."""
        self._expected = self._came = 0.0
        """Of tokens that were verified."""
        self._seen = np.zeros((len(_FIRST), _LEVELS, 3))
        """By state and level of the chance: tokens, expected and true ones."""

    @property
    def credit(self) -> float:
        """The share of the expected tokens that may be reckoned with, at most 1."""
        came = self._came + _CREDIT * _CREDIT_STRENGTH
        return min(came / (self._expected + _CREDIT_STRENGTH), 1.0)

    def verified(self, expected: float, accepted: int) -> None:
        """Of a search's tokens some were verified: so many were expected, and came."""
        self._expected = _CREDIT_FADE * self._expected + expected
        self._came = _CREDIT_FADE * self._came + accepted

    def begin(self, handle: int) -> None:
        """The handle stands for a new sequence from now on."""
        self._since[handle] = -1 - _BEGUN

    def rested(self, handles: Ints) -> None:
        """These made a token, and nothing was proposed to them."""
        since = self._since[handles]
        self._since[handles] = np.where(since < 0, -1 - _UNKNOWN, since + 1)

    def temper(self, proposals: Proposals, handles: Ints) -> NDArray[np.float32]:
        """The reach [n, W] of the proposals for these sequences, as far as they are trusted."""
        return _temper(
            proposals.reach, proposals.parents, proposals.counts, self._since[handles], self._seen
        )

    def observe(
        self,
        proposals: Proposals,
        rows: Ints,
        handles: Ints,
        made: NDArray[np.int32],
        offsets: Ints,
    ) -> None:
        """Sequence handles[i] made `made[offsets[i]:offsets[i + 1]]`; its proposal is in `rows[i]`.

        A row of -1: there was none.
        """
        _observe(
            proposals.tokens, proposals.parents, proposals.reach, proposals.counts,
            rows, handles, made, offsets, self._since, self._seen,
        )  # fmt: skip


@njit(cache=True)
def _state(since):
    if since < 0:
        return -1 - since
    return _LATELY if since <= _LATE else _ONCE


@njit(cache=True)
def _level(chance):
    """Finer where chances are high: 1 - chance by powers of the square root of 2."""
    miss = min(max(1.0 - chance, 1e-3), 1.0)
    return min(int(-2.0 * np.log2(miss)), _LEVELS - 1)


@njit(cache=True)
def _chance(reach, parents, node):
    """Of a token, given that its parent comes true."""
    before = 1.0 if parents[node] < 0 else reach[parents[node]]
    return reach[node] / before if before > 0 else 0.0


@njit(cache=True)
def _temper(reach, parents, counts, since, seen):
    tempered = np.zeros(reach.shape, np.float32)
    for i in range(len(counts)):
        state = _state(since[i])
        for node in range(counts[i]):
            chance = _chance(reach[i], parents[i], node)
            _, expected, true = seen[state, _level(chance)]
            assumed = _STRENGTH * chance + 1e-9
            chance *= (true + assumed * _FIRST[state]) / (expected + assumed)
            before = 1.0 if parents[i, node] < 0 else tempered[i, parents[i, node]]
            tempered[i, node] = min(chance, 1.0) * before
    return tempered


@njit(cache=True)
def _observe(tokens, parents, reach, counts, rows, handles, made, offsets, since, seen):
    for i in range(len(rows)):
        row, handle = rows[i], handles[i]
        known = since[handle]
        tokens_made = made[offsets[i] : offsets[i + 1]]
        has_proposal = row >= 0 and counts[row] > 0
        if known >= 0:
            since[handle] += len(tokens_made)
        elif not has_proposal:
            since[handle] = -1 - _UNKNOWN
        elif known == -1 - _BEGUN:
            since[handle] = -1 - _FOLLOWS
        if has_proposal:
            left = _follow(
                tokens[row], parents[row], reach[row], counts[row], tokens_made, seen[_state(known)]
            )
            if left >= 0:
                since[handle] = left


@njit(cache=True)
def _follow(tokens, parents, reach, count, made, seen):
    """Count what came true by level; return tokens since the response left, -1 if it did not."""
    depth = np.full(count, -1, np.int64)
    deepest, refused = 0, -1
    for node in range(count):
        if parents[node] >= 0 and depth[parents[node]] < 0:
            continue
        place = 0 if parents[node] < 0 else depth[parents[node]] + 1
        if place >= len(made):
            continue
        chance = _chance(reach, parents, node)
        cell = seen[_level(chance)]
        if cell[0] > _MEMORY:
            cell *= 0.5
        cell[0] += 1
        cell[1] += chance
        if tokens[node] == made[place]:
            depth[node] = place
            cell[2] += 1
            deepest = max(deepest, place + 1)
        else:
            refused = max(refused, place)
    return len(made) - deepest - 1 if refused >= deepest else -1


__all__ = ["Trust"]
