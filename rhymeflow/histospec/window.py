"""How many tokens are drafted for whom: three rules with one interface.

A rule says before the search how many tokens it could use for each sequence (`most`), after the
search how many of those found are verified (`cut`), and hears what became of them (`observe`).

- `Aimd`: starts at 2, two more after a draft that was accepted whole, back to 2 after a rejection
  (RhymeRL, arXiv 2508.18588, section on HistoSpec).
- `Doubling`: twice after a draft that was accepted whole, half after a rejection, from 2 to 16
  (the code its authors released).
- `Cost`: of all nodes of all sequences those that make the most tokens per second.

**`Cost` is exact for its model.** A node's reach is the chance that it and all before it are
accepted, so nodes S add sum(reach over S) tokens to the one that each sequence makes anyway, and an
iteration of B + m rows takes T(B + m) seconds. For a given m the sum is largest for the m nodes of
the largest reach, and as a node's reach is at most its parent's these are closed under parents. So
the best of all choices is among the cuts of the nodes sorted by reach, and all of them are looked
at: whatever the form of T, steps included. Weights multiply a sequence's tokens, which changes
nothing in this. If the best is hardly better than none, it is none.

**Weights make drafts worth more than they save.** Where a row costs as much as a token, a draft for
a sequence of weight w is taken as soon as its chance is above 1 / w, and the batch as a whole gets
slower by it. Of each iteration with drafts at most `MOST_LOSS` of the plain tokens a second may be
lost so: only cuts that are expected to keep the rest are looked at. Without weights no cut that is
better than none loses any. A weight counts as far as there are few who have it: where all weigh the
same nothing is different, and a gain for one is still measured against the whole batch.

**Prompts that are taken in** in the same iteration take their time whatever is drafted. So what a
second is worth, in tokens, is found as if sequences ran alone, and the cut is the one whose tokens
are worth most beyond the seconds that it adds. Without prompts this is the same cut.

**What may be lost is limited.** If nothing is accepted, a draft costs all that it adds to the
iteration, and as long as little is known of prices, more than the model says. Only cuts of which
that is no more than `risk` are looked at, or a single token.

Holds true: a rule never gives a sequence more than was found for it. Knows nothing of tokens.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhymeflow.histospec.timing import Curve, at

LEAST_GAIN = 0.02
"""Gains below this share are less than times are known to, and are left alone."""
SMALLEST = 2
DOUBLING_LARGEST = 16
MOST_LOSS = 0.1
"""Share of the tokens a second that may be given up for what sequences of more weight gain."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Iteration(NamedTuple):
    """What a draft is weighed against: an iteration of `rows` rows without drafts."""

    rows: int
    curve: Curve | None
    """Seconds by rows; None as long as no iteration was seen."""
    weights: Floats | None = None
    """What a token of each sequence is worth; None: 1."""
    alone: Curve | None = None
    """Seconds by rows if nothing but sequences ran; None: as `curve`."""
    sequences: int = 0
    """How many rows that is without drafts."""
    doubt: float = 0.0
    """Seconds that a drafted token may cost beyond what the curve says."""
    risk: float = np.inf
    """Seconds that may be lost, should it be so."""
    credit: float = 1.0
    """The share of the expected tokens that is reckoned with."""


class Rule(Protocol):
    """A window rule."""

    def begin(self, handle: int) -> None:
        """The handle stands for a new sequence from now on."""
        ...

    def most(self, handles: Ints, room: Ints) -> Ints:
        """Tokens worth searching for."""
        ...

    def cut(self, reach: NDArray[np.float32], counts: Ints, iteration: Iteration) -> Ints:
        """Tokens to verify, at most `counts`: of each row of `reach` [n, W] the first so many."""
        ...

    def observe(self, handles: Ints, lengths: Ints, accepted: Ints) -> None:
        """Of each sequence's `lengths` verified tokens, `accepted` were."""
        ...


class Aimd:
    """Two more, or back to two."""

    def __init__(self, *, max_sequences: int, max_draft: int) -> None:
        self._sizes = np.full(max_sequences, min(SMALLEST, max_draft), np.int64)
        self._max_draft = max_draft

    def begin(self, handle: int) -> None:
        """The handle stands for a new sequence from now on."""
        self._sizes[handle] = min(SMALLEST, self._max_draft)

    def most(self, handles: Ints, room: Ints) -> Ints:
        """Tokens worth searching for: the window."""
        return np.minimum(self._sizes[handles], room)

    def cut(self, reach: NDArray[np.float32], counts: Ints, iteration: Iteration) -> Ints:
        """All that was found."""
        return counts

    def observe(self, handles: Ints, lengths: Ints, accepted: Ints) -> None:
        """Change the windows of sequences that had a draft."""
        drafted = lengths > 0
        handles, whole = handles[drafted], accepted[drafted] >= lengths[drafted]
        self._sizes[handles] = np.where(
            whole, self._larger(self._sizes[handles]), self._smaller(self._sizes[handles])
        )

    def _larger(self, sizes: Ints) -> Ints:
        return np.minimum(sizes + 2, self._max_draft)

    def _smaller(self, sizes: Ints) -> Ints:
        return np.full_like(sizes, min(SMALLEST, self._max_draft))


class Doubling(Aimd):
    """Twice, or half."""

    def __init__(self, *, max_sequences: int, max_draft: int) -> None:
        max_draft = min(max_draft, DOUBLING_LARGEST)
        super().__init__(max_sequences=max_sequences, max_draft=max_draft)

    def _larger(self, sizes: Ints) -> Ints:
        return np.minimum(sizes * 2, self._max_draft)

    def _smaller(self, sizes: Ints) -> Ints:
        return np.maximum(sizes // 2, min(SMALLEST, self._max_draft))


class Cost:
    """As many, and for those sequences, as make the most tokens per second."""

    def __init__(self, *, max_draft: int) -> None:
        self._max_draft = max_draft

    def begin(self, handle: int) -> None:
        """Nothing is kept of a sequence."""

    def most(self, handles: Ints, room: Ints) -> Ints:
        """Tokens worth searching for: whatever there is."""
        return np.minimum(room, self._max_draft)

    def cut(self, reach: NDArray[np.float32], counts: Ints, iteration: Iteration) -> Ints:
        """The cut with the most (weighted) tokens per second; the shortest of equals."""
        curve = iteration.curve
        if curve is None:
            return np.zeros(len(counts), np.int64)
        weights = np.ones(len(counts)) if iteration.weights is None else iteration.weights
        worth = _worth(reach, counts, weights)
        if iteration.weights is None:
            worth = tokens = np.sort(worth)
        else:  # in rising order; of nodes worth the same the first come last, to be taken first
            order = np.argsort(worth[::-1], kind="stable")
            worth, tokens = worth[::-1][order], _tokens(reach, counts)[::-1][order]
        alone, sequences = iteration.alone, iteration.sequences
        if alone is None:
            alone, sequences = curve, iteration.rows
        size = _best_size(
            iteration.credit * worth, weights.sum(), iteration.credit * tokens, len(counts),
            iteration.rows, curve.rows, curve.seconds, sequences, alone.rows, alone.seconds,
            iteration.doubt, iteration.risk,
        )  # fmt: skip
        return _first(reach, counts, weights, worth, size)

    def observe(self, handles: Ints, lengths: Ints, accepted: Ints) -> None:
        """Nothing is kept of a sequence."""


@njit(cache=True)
def _worth(reach, counts, weights):
    """What each node adds, float64 [sum(counts)]."""
    worth = np.empty(counts.sum())
    size = 0
    for i in range(len(counts)):
        for node in range(counts[i]):
            worth[size] = reach[i, node] * weights[i]
            size += 1
    return worth


def _tokens(reach, counts):
    """The chance of each node, float64 [sum(counts)], as `_worth` has them."""
    return reach[np.arange(reach.shape[1]) < counts[:, None]].astype(np.float64)


@njit(cache=True)
def _best_size(
    worth, total, tokens, count, rows, knots, seconds, sequences, alone_knots, alone_seconds,
    doubt, risk,
):  # fmt: skip
    """How many nodes to take, given what the nodes are worth in rising order.

    `total`: what the batch makes without drafts. `tokens`, `count`: the same by number of tokens.
    """
    first = at(float(rows), knots, seconds)
    plain = at(float(sequences), alone_knots, alone_seconds)
    price = best = plain / total
    gained = made = 0.0
    is_fit = np.zeros(len(worth) + 1, np.bool_)
    for size in range(1, len(worth) + 1):
        gained += worth[len(worth) - size]
        made += tokens[len(worth) - size]
        cost = at(float(rows + size), knots, seconds) - first
        keeps = count + made >= (1 - MOST_LOSS) * count * (1 + cost / plain)
        is_fit[size] = keeps and (size == 1 or cost + doubt * size <= risk)
        if is_fit[size]:
            every = at(float(sequences + size), alone_knots, alone_seconds)
            best = min(best, every / (total + gained))
    chosen, most, gained = 0, 0.0, 0.0
    if best * (1 + LEAST_GAIN) >= price:
        return chosen
    for size in range(1, len(worth) + 1):
        gained += worth[len(worth) - size]
        gain = best * gained - at(float(rows + size), knots, seconds) + first
        if is_fit[size] and gain > most:
            most, chosen = gain, size
    return chosen


@njit(cache=True)
def _first(reach, counts, weights, worth, chosen):
    """The `chosen` nodes that are worth most, as lengths."""
    lengths = np.zeros(len(counts), np.int64)
    if not chosen:
        return lengths
    least = worth[len(worth) - chosen]
    # Of the nodes worth exactly the least, the first ones.
    above = len(worth) - np.searchsorted(worth, least, side="right")
    ties = chosen - above
    for i in range(len(counts)):
        while lengths[i] < counts[i]:
            value = reach[i, lengths[i]] * weights[i]
            if value < least or (value == least and ties == 0):
                break
            ties -= value == least
            lengths[i] += 1
    return lengths


def make_rule(name: str, *, max_sequences: int, max_draft: int) -> Rule:
    """The rule called `aimd`, `doubling` or `cost`."""
    if name == "cost":
        return Cost(max_draft=max_draft)
    kind = {"aimd": Aimd, "doubling": Doubling}[name]
    return kind(max_sequences=max_sequences, max_draft=max_draft)


__all__ = ["Aimd", "Cost", "Doubling", "Iteration", "Rule", "make_rule"]
