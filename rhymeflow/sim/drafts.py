"""Drafts in the simulator: tokens drafted for each class, and tokens generated per iteration.

A drafter that assumes an acceptance a expects to reach a node at depth k with probability a^k, so
the likeliest nodes are drafted first. Generated tokens are concave in the number of drafted tokens
and seconds are convex, so their ratio rises, then falls: only ends of levels and the cost model's
corner need to be compared."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from math import ceil, floor, inf, log, sqrt
from typing import NamedTuple

import numpy as np

from rhymeflow.core.cost import CostModel

RATES = (0.2, 0.394, 0.541, 0.652, 0.738, 0.805, 0.861, 0.907, 0.949, 0.986)
"""Acceptance of the classes of responses. A turn is in the one nearest to its own rate, so that
responses of one class advance together: with 16 drafted tokens each makes 1.32 times as many tokens
in an iteration as the one before, so that those of a response are off by 15% at most."""
ROUNDING = 1e-6  # tokens; upper bound of the error of sums of fractions
BAND = 0.1  # relative width of a band of cache sizes that share one choice, see `_edges`
_MOST_REMEMBERED = 200_000

Counts = tuple[int, ...]  # trajectories that decode, by class


class Choice(NamedTuple):
    """The drafts of an iteration."""

    gains: tuple[float, ...]  # mean tokens that a trajectory generates, by class
    drafted: tuple[int, ...]  # tokens drafted for all trajectories of a class
    generated: float  # tokens that all trajectories generate
    searching: float  # seconds of looking for drafts
    until: float  # the choice holds while the cache has fewer tokens, by more than `ROUNDING`


class Drafts:
    """Chooses drafts, and remembers its choices. `acceptance`: by class, rising, the probability
    that a drafted token is accepted if those before it were. With `max_draft` 0 nothing is drafted,
    and one class is enough."""

    def __init__(
        self,
        cost: CostModel,
        *,
        acceptance: tuple[float, ...] = RATES,
        max_draft: int,
        kv_capacity: int,
        search_seconds: float = 0.0,
    ) -> None:
        """`search_seconds`: of looking for a draft for one trajectory."""
        self.cost, self.max_draft, self._search_seconds = cost, max_draft, search_seconds
        self.acceptance = acceptance if max_draft else (0.0,)
        self._log_tokens = [log(_tokens_of(rate, max_draft)) for rate in self.acceptance]
        self._corner = floor((cost.k2 - cost.c) / cost.k3) if cost.k3 > 0 else 0
        """Most rows whose arithmetic takes no longer than reading the weights."""
        self._edges = _edges(cost, kv_capacity) if max_draft else []
        self._levels = self._likeliest_first()
        self._chosen = lru_cache(_MOST_REMEMBERED)(self._choose)

    def class_of(self, acceptance: float) -> int:
        """Return the class of a response whose drafted tokens are accepted at this rate."""
        own = log(_tokens_of(acceptance, self.max_draft))
        places = range(len(self._log_tokens))
        return min(places, key=lambda index: abs(self._log_tokens[index] - own))

    def choose(self, counts: Counts, kv_tokens: float, room: int) -> Choice:
        """Choose the drafts that are expected to generate most tokens per second, of at most `room`
        tokens."""
        # A cache exactly at an edge is beyond it, however its sum of fractions was rounded.
        choice = self._chosen(counts, bisect_right(self._edges, kv_tokens + ROUNDING))
        if sum(choice.drafted) <= room:
            return choice
        return self._choice(counts, self._levels_of(counts), room, inf)

    def none(self, counts: Counts) -> Choice:
        """Return the choice without drafts."""
        return self._choice(counts, [], 0, inf)

    def _choose(self, counts: Counts, band: int) -> Choice:
        low = self._edges[band - 1] if band else 0.0
        until = self._edges[band] if band < len(self._edges) else inf
        kv_tokens = (low + until) / 2 if until < inf else low
        levels = self._levels_of(counts)
        size = self._best_size(counts, levels, kv_tokens)
        return self._choice(counts, levels, size, until)

    def _levels_of(self, counts: Counts) -> list[tuple[float, int]]:
        return [level for level in self._levels if counts[level[1]]]

    def _best_size(self, counts: Counts, levels: list[tuple[float, int]], kv_tokens: float) -> int:
        """Return how many nodes to draft of these levels, which are in order of probability."""
        seconds, rows = self.cost.iteration, sum(counts)
        tokens, searching = float(rows), self._search_seconds * rows
        best_rate, best_size, size = tokens / seconds(rows, kv_tokens), 0, 0
        for path_probability, index in levels:
            count, falls = counts[index], True
            spare = self._corner - rows - size
            for extra in (spare, spare + 1, count):
                if 0 < extra <= count:
                    taken = seconds(rows + size + extra, kv_tokens) + searching
                    rate = (tokens + extra * path_probability) / taken
                    if rate > best_rate:
                        best_rate, best_size, falls = rate, size + extra, False
            if falls:
                break
            size += count
            tokens += count * path_probability
        return best_size

    def _likeliest_first(self) -> list[tuple[float, int]]:
        """Return (assumed probability of a node, class) of the levels of all classes' drafts."""
        nodes = [
            (-(assumed(rate) ** depth), index, depth)
            for index, rate in enumerate(self.acceptance)
            for depth in range(1, self.max_draft + 1)
        ]
        return [(-path_probability, index) for path_probability, index, _ in sorted(nodes)]

    def _choice(
        self, counts: Counts, levels: list[tuple[float, int]], size: int, until: float
    ) -> Choice:
        """Return the choice of the first `size` nodes of these levels."""
        gains, path_probability = [1.0] * len(counts), list(self.acceptance)
        drafted = [0] * len(counts)
        generated, remaining = float(sum(counts)), size
        for _, index in levels:
            taken = min(remaining, counts[index])
            if not taken:
                break
            remaining -= taken
            drafted[index] += taken
            gains[index] += path_probability[index] * taken / counts[index]
            generated += path_probability[index] * taken
            path_probability[index] *= self.acceptance[index]
        searching = self._search_seconds * sum(counts) if size else 0.0
        return Choice(tuple(gains), tuple(drafted), generated, searching, until)


def assumed(rate: float) -> float:
    """Return the acceptance that a drafter assumes for a response whose true acceptance is `rate`.
    It is not told which responses leave what was said before, and so drafts more than is best where
    little is accepted (fitted to runs, docs/simulator.md)."""
    return max(rate, 0.3 + 0.65 * rate)


def _edges(cost: CostModel, kv_capacity: int) -> list[float]:
    """Return the cache sizes, in tokens, at which a band ends and the next begins."""
    edges: list[float] = []
    if cost.k1 > 0:
        # The tokens whose reading takes as long as the rest of the smallest iteration.
        unit = max(1.0, (cost.k2 + cost.k4) / cost.k1)
        edge = unit * BAND
        while edge < kv_capacity:
            edges.append(edge)
            edge = (edge + unit) * (1 + BAND) - unit
    return edges


# -- acceptance of a response ----------------------------------------------------------------------

NEW = 0.3
"""Acceptance for prompts without responses of an earlier epoch, whose drafts come from siblings."""
SLOPES = 0.4, 1.3
"""Powers of the length with which the odds of acceptance fall, for new and for known prompts, as in
runs of recipe `emulated` (docs/simulator.md)."""


def expected_rate(acceptance: float, relative_length: float, *, is_known: bool) -> float:
    """Return the rate of a response of `relative_length` times the mean: `acceptance` at the mean
    if its prompt had responses in an earlier epoch, else `NEW`. Long responses leave what was said
    before more often, and a batch waits for them."""
    rate = acceptance if is_known else NEW
    odds = rate / (1 - rate) * relative_length ** -SLOPES[is_known]
    return float(odds / (1 + odds))


def _tokens_of(rate: float, drafted: float) -> float:
    """Return the tokens of an iteration with so many drafted, in the mean of iterations."""
    whole, part = divmod(drafted, 1)
    return sum(rate**depth for depth in range(int(whole) + 1)) + part * rate ** (whole + 1)


def rate_of(decoded: Sequence[int], steps: int, drafted: int) -> float:
    """Return the acceptance, between those of `RATES`, with which decodes of so many tokens take
    `steps` iterations together, each with its part of the `drafted` tokens; the least if nothing
    was drafted. In the simulator a decode takes its tokens over the gain of an iteration, rounded
    up; of the gains that would do, the one in the middle counts."""
    if not drafted:
        return RATES[0]
    each = drafted / steps

    def least(most: int) -> float:
        """The least gain with which they take at most `most` iterations."""
        if sum(min(n, 1) for n in decoded) > most:
            return 1 + each
        low, high = 1.0, float(max(decoded))
        while high - low > 1e-3 * low:
            gain = sqrt(low * high)
            if sum(ceil(n / gain) for n in decoded) <= most:
                high = gain
            else:
                low = gain
        return high

    gain = sqrt(least(steps) * least(steps - 1))
    return float(np.interp(gain, [_tokens_of(rate, each) for rate in RATES], RATES))
