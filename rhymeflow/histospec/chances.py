"""How likely a drafted token is accepted, given that the one before it was: learned while it runs.

What is known of a drafted token when it is proposed falls into a cell (`cells.py`). A cell's chance
is estimated from what became of its tokens, and from its neighbours as long as there were few: with
h of n tokens accepted it is (h + s p) / (n + s), where p is the estimate for a group of cells that
it belongs to, found in the same way from a larger group. So a cell that was never seen starts from
what is common, and the largest groups from what they were given to begin with.

A trial need not have been verified in one pass. The engine makes the same tokens with drafts as
without, so a proposed token whose parent came true did come true or not, verified or not. That
makes the estimates independent of what is chosen to be verified.

Holds true: chances lie in (0, 1); only tokens whose parent was accepted count. Knows nothing of how
cells are told apart.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

_STRENGTH = 8.0
"""Trials that a group's estimate counts for in its members'."""
_MEMORY = 2000.0
"""Trials after which older ones fade, so that the estimates follow the policy."""
_JUDGED = 50_000.0
"""Trials over which the calibration is judged, by half-life."""
_BUCKETS = 10

Ints = NDArray[np.int64]


class Chances:
    """Acceptance by cell; `values` float32 [cells] is changed in place, so it can be shared.

    `groups` int64 [levels, cells]: for each cell its group, the largest groups first and the cell
    itself last; a level's groups are parts of those of the level before. `prior` float64 [cells] is
    what the first level starts from.
    """

    def __init__(self, groups: Ints, prior: NDArray[np.float64]) -> None:
        self.values = prior.astype(np.float32)
        self._groups, self._prior = groups, prior
        self._tried = np.zeros(groups.shape)
        self._accepted = np.zeros(groups.shape)
        self._judged = np.zeros((3, _BUCKETS))

    def observe(self, tried: Ints, accepted: Ints) -> None:
        """Take in, per cell, how many tokens were tried and how many of them were accepted."""
        _judge(self._judged, self.values, tried, accepted)
        _learn(self._groups, self._prior, tried, accepted, self._tried, self._accepted, self.values)

    @property
    def calibration_error(self) -> float:
        """Mean distance of what was predicted from what came, over tenths of the predictions.

        0: of all tokens that were given 70%, 70% were accepted.
        """
        tried, expected, accepted = self._judged
        return float(np.abs(expected - accepted).sum() / max(tried.sum(), 1.0))


@njit(cache=True)
def _judge(judged, values, tried, accepted):
    """Compare with what was predicted, before it is learned from."""
    judged *= 0.5 ** (tried.sum() / _JUDGED)
    for cell in range(len(values)):
        if tried[cell]:
            bucket = min(int(values[cell] * _BUCKETS), _BUCKETS - 1)
            judged[0, bucket] += tried[cell]
            judged[1, bucket] += tried[cell] * values[cell]
            judged[2, bucket] += accepted[cell]


@njit(cache=True)
def _learn(groups, prior, tried, accepted, total, hits, values):
    levels, cells = groups.shape
    for level in range(levels):
        for cell in range(cells):
            total[level, groups[level, cell]] += tried[cell]
            hits[level, groups[level, cell]] += accepted[cell]
        for group in range(cells):
            if total[level, group] > _MEMORY:
                hits[level, group] *= _MEMORY / total[level, group]
                total[level, group] = _MEMORY
    for cell in range(cells):
        chance = prior[cell]
        for level in range(levels):
            group = groups[level, cell]
            chance = (hits[level, group] + _STRENGTH * chance) / (total[level, group] + _STRENGTH)
        values[cell] = chance


@njit(cache=True)
def walk(tokens, parents, cells, counts, rows, made, offsets, lengths, tried, accepted):
    """Compare proposals with what was made; return accepted tokens per sequence, int64 [n].

    `tokens`, `parents`, `cells` [m, W] and `counts` [m] are proposals, `lengths` [m] how many of
    each were verified; sequence i has row `rows[i]` (-1: none) and made `made[offsets[i]:
    offsets[i + 1]]`. Per cell, `tried` and `accepted` are added to for every proposed token whose
    parent came true, if the response went on as far.
    """
    taken = np.zeros(len(rows), np.int64)
    depth = np.empty(tokens.shape[1], np.int64)
    for i in range(len(rows)):
        row = rows[i]
        if row < 0:
            continue
        end = offsets[i + 1] - offsets[i]
        for node in range(counts[row]):
            parent = parents[row, node]
            # -1 is kept for a node that did not come true.
            if parent >= 0 and depth[parent] < 0:
                depth[node] = -1
                continue
            place = 0 if parent < 0 else depth[parent] + 1
            depth[node] = -1
            if place >= end:
                continue
            cell = cells[row, node]
            tried[cell] += 1
            if tokens[row, node] == made[offsets[i] + place]:
                depth[node] = place
                accepted[cell] += 1
                taken[i] += node < lengths[row]
    return taken


__all__ = ["Chances", "walk"]
