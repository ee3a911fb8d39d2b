"""Decides how much is drafted: expected acceptance against the time it costs on this machine.

- `Acceptance`: one acceptance rate per class of token, learned from the results of proposals.
- `Prices`: the seconds of an iteration, by its contents and its number of rows.
- `best_cut`: the nodes, of all sequences' proposals, that make the most tokens per second.
- `Budget`: whether to search, so that drafting costs little where it does not pay.
- `Aimd`: RhymeRL's rule, which uses none of these."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhymeflow.histospec.build_draft import (
    NUM_CLASSES,
    NUM_KINDS,
    NUM_SHARES,
    NUM_STATES,
    Proposals,
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BEGUN, FOLLOWS, LEFT_LATELY, LEFT_BEFORE = range(NUM_STATES)
"""States of a sequence: unknown; it follows the proposals; it left a proposal within the last
`_LATELY` tokens; it left one before. A sequence that has left a proposal leaves the next sooner."""
_STATE_PRIOR = np.array([1.0, 1.0, 0.7, 0.8])
_LATELY = 4
_FOLLOWING, _UNKNOWN = -2, -1
"""In place of the tokens since a sequence left a proposal: it follows proposals, or is unknown."""
_STRENGTH = 8.0  # weight of a prior, in tokens
_MEMORY = 1000.0
"""Tokens after which the counts of a class are halved, so that rates follow the policy."""
_DISCOUNT, _DISCOUNT_STRENGTH, _DISCOUNT_FADE = 0.85, 20.0, 0.99
"""The prior of `Acceptance.discount`, its weight in tokens, and the decay per iteration."""


class Acceptance:
    """The probability that a token is accepted, given that its parent was.

    While a class (`build_draft.class_of`) has few counts, its rate follows its share of the votes.
    A proposed token counts if its parent was right and the response reached its position, whether
    it was verified or not, so rates do not depend on what is chosen to be verified. `rates` float32
    [NUM_CLASSES] is changed in place."""

    def __init__(self, max_sequences: int) -> None:
        self._trials = np.zeros((NUM_CLASSES, 2))
        """By class: tokens that counted, and how many of them were right."""
        self.rates = np.empty(NUM_CLASSES, np.float32)
        self._since = np.full(max_sequences, _UNKNOWN, np.int64)
        """By handle: tokens since it left a proposal, `_FOLLOWING` or `_UNKNOWN`."""
        self._expected = self._accepted = 0.0  # decayed numbers of verified tokens
        self._estimate()

    @property
    def discount(self) -> float:
        """Accepted over expected tokens, at most 1. Fewer are accepted than expected, because the
        tokens that look likeliest are often overrated, and siblings are wrong together."""
        accepted = self._accepted + _DISCOUNT * _DISCOUNT_STRENGTH
        return min(accepted / (self._expected + _DISCOUNT_STRENGTH), 1.0)

    def begin(self, handle: int) -> None:
        """Reset the state of a handle that stands for a new sequence."""
        self._since[handle] = _UNKNOWN

    def states(self, handles: Ints) -> Ints:
        """Return the states of these sequences, int64 [n]."""
        since = self._since[handles]
        left = np.where(since <= _LATELY, LEFT_LATELY, LEFT_BEFORE)
        return np.where(since >= 0, left, np.where(since == _FOLLOWING, FOLLOWS, BEGUN))

    def observe_undrafted(self, handles: Ints) -> None:
        """Record that these sequences got a token each without a proposal."""
        since = self._since[handles]
        self._since[handles] = np.where(since < 0, _UNKNOWN, since + 1)

    def observe(
        self,
        proposals: Proposals,
        lengths: Ints,
        rows: Ints,
        handles: Ints,
        generated: NDArray[np.int32],
        offsets: Ints,
    ) -> Ints:
        """Learn from the results of proposals; return accepted tokens by sequence, int64 [n].

        Sequence handles[i] got `generated[offsets[i]:offsets[i + 1]]`; its proposal is row rows[i]
        of `proposals` (-1: it had none). Of proposal j the first `lengths[j]` tokens were verified.
        """
        accepted = np.zeros(len(rows), np.int64)
        _walk(
            proposals, lengths, rows, handles, generated, offsets,
            self._since, self._trials, accepted,
        )  # fmt: skip
        self._estimate()
        verified = np.arange(proposals.tokens.shape[1]) < lengths[:, None]
        expected = float(proposals.path_probability[verified].sum())
        self._expected = _DISCOUNT_FADE * self._expected + expected
        self._accepted = _DISCOUNT_FADE * self._accepted + int(accepted.sum())
        return accepted

    def _estimate(self) -> None:
        # By [kind, state, share]. The rate of a share over all kinds and states is the prior of its
        # classes, scaled by their state.
        tried, right = self._trials.reshape(NUM_SHARES, NUM_STATES, NUM_KINDS, 2).T
        votes = (np.arange(NUM_SHARES) + 0.5) / NUM_SHARES
        share_rate = (right.sum((0, 1)) + _STRENGTH * votes) / (tried.sum((0, 1)) + _STRENGTH)
        prior = _STATE_PRIOR[:, None] * share_rate
        self.rates[:] = ((right + _STRENGTH * prior) / (tried + _STRENGTH)).T.ravel()


@njit(cache=True)
def _walk(proposals, lengths, rows, handles, generated, offsets, since, trials, accepted):
    """Update `trials` and `since`, and fill `accepted`."""
    tokens, parents, classes = proposals.tokens, proposals.parents, proposals.classes
    depth = np.empty(tokens.shape[1], np.int64)
    for i in range(len(rows)):
        row, size = rows[i], offsets[i + 1] - offsets[i]
        count = proposals.counts[row] if row >= 0 else 0
        deepest, refused = 0, -1
        for node in range(count):
            parent = parents[row, node]
            depth[node] = -1  # stays so unless the node is right
            place = 0 if parent < 0 else depth[parent] + 1
            if place >= size or (parent >= 0 and depth[parent] < 0):
                continue
            is_right = tokens[row, node] == generated[offsets[i] + place]
            trial = trials[classes[row, node]]
            if trial[0] >= _MEMORY:
                trial *= 0.5
            trial[0] += 1
            trial[1] += is_right
            if is_right:
                depth[node] = place
                deepest = max(deepest, place + 1)
                accepted[i] += node < lengths[row]
            else:
                refused = max(refused, place)
        handle = handles[i]
        # At the place `deepest` a token was proposed, and another one generated: there the sequence
        # left the proposal. Once it has left, it only counts its tokens since.
        if count > 0 and refused >= deepest:
            since[handle] = size - deepest - 1
        elif since[handle] >= 0:
            since[handle] += size
        else:
            since[handle] = _FOLLOWING if count > 0 else _UNKNOWN


_QUANTITIES = 5
"""Quantities with a price: an iteration, a sequence, a drafted row, a prompt's row, a cached
token."""
_SEQUENCE, _DRAFTED, _PROMPT, _CACHED = range(1, _QUANTITIES)
_EXACT, _PER_OCTAVE, _BINS = 16, 4, 80
"""Bins by the number of rows: those of one number each, those per doubling after that, and all."""
_FADE = 0.998  # decay of the sums per iteration
_CLIP = 0.5  # seconds are clipped to within this share of the expected ones
_FIXED_SHARE = 0.5  # assumed share of an iteration that does not grow with its sequences
_ASSUMED, _WORST = 0.1, 2.0
"""Assumed price of a drafted row, and the worst, in prices of a sequence."""
_WEIGHT = 0.1
"""Weight of the assumptions, in iterations of the usual size; half of it for the one on drafted
rows, which are tried few at a time."""
_DOUBTED = 0.2  # share of the evidence on drafted rows that `Prices.doubt_drafted` keeps
_SWEEPS = 30  # of coordinate descent over the prices
_RECENT = 30  # iterations that a bin remembers, about
_STRAIGHT = 2.0  # weight, in iterations, of the assumption that a bin's factor is 1


class Prices:
    """The seconds of an iteration: a sum of quantities times prices, times a factor by its rows.

    Prices fit all observed iterations, by relative error, so observations of some mixes predict
    every other mix. The factor describes what is not linear: a GPU's time is flat and then steep, a
    CPU's rises in steps."""

    def __init__(self) -> None:
        self._sums = np.zeros((_QUANTITIES, _QUANTITIES + 1))
        """Sums of products of an iteration's quantities (and seconds), each divided by its expected
        seconds squared: errors are relative."""
        self._prices = np.zeros((2, _QUANTITIES))  # expected, and at worst
        self._bins = np.zeros((_BINS, _QUANTITIES + 1))
        """By number of rows: sums of the quantities and seconds of recent iterations."""
        self.num_seen = 0

    def observe(
        self, sequences: int, drafted: int, prompt_rows: int, kv_tokens: int, seconds: float
    ) -> None:
        """Learn from an iteration of `sequences` > 0 that took `seconds` > 0."""
        assert sequences > 0
        assert seconds > 0
        row = np.array([1.0, sequences, drafted, prompt_rows, kv_tokens, seconds])
        _learn(row, self._sums, self._prices, self._bins, self.num_seen)
        self.num_seen += 1

    def seconds(
        self, sequences: int, kv_tokens: int, max_drafted: int, *, at_worst: bool = False
    ) -> Floats:
        """Return an iteration's seconds with 0, 1, ... `max_drafted` drafted rows, never falling.
        `at_worst`: assume the worst price of drafted rows where nothing is known."""
        row = np.array([1.0, sequences, 0.0, 0.0, kv_tokens])
        return _seconds(row, self._prices[int(at_worst)], self._bins, max_drafted)

    def doubt_drafted(self) -> None:
        """Forget most of what was learned about drafted rows, which may have seemed expensive only
        because the machine was busy once; else they would never be tried again."""
        kept = self._sums[_DRAFTED, _DRAFTED] * _DOUBTED
        self._sums[_DRAFTED] *= _DOUBTED
        self._sums[:, _DRAFTED] *= _DOUBTED
        self._sums[_DRAFTED, _DRAFTED] = kept


@njit(cache=True)
def _learn(row, sums, prices, bins, seen):
    seconds = expected = row[_QUANTITIES]
    entry = bins[_bin(row[_SEQUENCE] + row[_DRAFTED])]
    if seen:
        expected = max(_linear(row, prices[0]), 1e-9) * _factor(entry, prices[0])
        seconds = min(max(seconds, (1 - _CLIP) * expected), (1 + _CLIP) * expected)
    if row[_PROMPT] == 0:
        if entry[0] > _RECENT:
            entry *= 0.9
        entry[:_QUANTITIES] += row[:_QUANTITIES]
        entry[_QUANTITIES] += seconds
    sums *= _FADE
    for i in range(_QUANTITIES):
        for j in range(_QUANTITIES):
            sums[i, j] += row[i] * row[j] / expected**2
        sums[i, _QUANTITIES] += row[i] * seconds / expected**2
    _fit(sums, prices[0], _ASSUMED)
    _fit(sums, prices[1], _WORST)


@njit(cache=True)
def _fit(sums, prices, drafted_share):
    """Fit the prices, none below 0, to the observations and the assumptions."""
    full = sums.copy()
    seconds = sums[0, _QUANTITIES] / sums[0, 0]
    unit = _WEIGHT / seconds**2
    sequences, cached = sums[0, _SEQUENCE] / sums[0, 0], sums[0, _CACHED] / sums[0, 0]
    price = (1 - _FIXED_SHARE) * seconds / sequences
    # Each assumption counts like `_WEIGHT` iterations of `amounts[i]` of quantity i alone, at price
    # `assumed[i]`. The weight goes with the square: 0.7 halves it, and 12 keeps the price of cached
    # tokens near 0 until evidence is clear.
    assumed = (0.0, price, drafted_share * price, 0.0, 0.0)
    amounts = (0.0, sequences, 0.7 * sequences, 0.0, 12 * max(cached, 1.0))
    for i in range(_QUANTITIES):
        full[i, i] += unit * amounts[i] ** 2
        full[i, _QUANTITIES] += unit * amounts[i] ** 2 * assumed[i]
    # Assume that a drafted row and a prompt's row have the same price.
    likeness = unit * sequences**2
    for one, other in ((_DRAFTED, _PROMPT), (_PROMPT, _DRAFTED)):
        full[one, one] += likeness
        full[one, other] -= likeness
    for _ in range(_SWEEPS):
        for i in range(_QUANTITIES):
            rest = full[i, _QUANTITIES]
            for j in range(_QUANTITIES):
                if j != i:
                    rest -= full[i, j] * prices[j]
            prices[i] = max(rest / full[i, i], 0.0)


@njit(cache=True)
def _seconds(row, prices, bins, max_drafted):
    seconds = np.empty(max_drafted + 1)
    last, factor, least = -1, 1.0, 0.0
    for drafted in range(max_drafted + 1):
        row[_DRAFTED] = drafted
        if _bin(row[_SEQUENCE] + drafted) != last:
            last = _bin(row[_SEQUENCE] + drafted)
            factor = _factor(bins[last], prices)
        least = max(least, _linear(row, prices) * factor)
        seconds[drafted] = least
    return seconds


@njit(cache=True)
def _linear(row, prices):
    """Return the sum of quantities times prices."""
    total = 0.0
    for i in range(_QUANTITIES):
        total += row[i] * prices[i]
    return total


@njit(cache=True)
def _factor(entry, prices):
    """Return observed over expected seconds in a bin."""
    expected = max(_linear(entry, prices), 1e-9)
    return (entry[0] * entry[_QUANTITIES] / expected + _STRAIGHT) / (entry[0] + _STRAIGHT)


@njit(cache=True)
def _bin(rows):
    """Return the bin of a number of rows."""
    if rows <= _EXACT:
        return int(rows) - 1
    return min(_EXACT + int(_PER_OCTAVE * np.log2(rows / _EXACT)), _BINS - 1)


LEAST_GAIN = 0.02  # least relative gain that counts: times are not known more exactly


def best_cut(
    proposals: Proposals, seconds: Floats, worst: Floats, max_loss: float, discount: float
) -> Ints:
    """Return how many nodes of each proposal make the most tokens per second, int64 [n].

    A node's path probability is the chance that it and all before it are accepted, so a set S of
    nodes adds sum(path probability over S) tokens to the one that each sequence makes anyway. Among
    sets of m nodes the sum is largest for the m likeliest, which are a prefix of each proposal. So
    the best set is a prefix of all nodes sorted by path probability; all prefixes are compared,
    for any form of `seconds`. Prompts in the iteration add the same time to all, so they are left
    out.

    `seconds`: of the iteration with 0, 1, ... drafted rows, up to the number of nodes. The result
    is cut to the nodes that add at most `max_loss` to `worst`, but to no less than one node.
    `discount`: see `Acceptance`."""
    counts = proposals.counts
    is_node = np.arange(proposals.tokens.shape[1]) < counts[:, None]
    falling = -proposals.path_probability[is_node].astype(np.float64)
    order = np.argsort(falling)
    tokens = np.append(0.0, np.cumsum(-falling[order])) * discount
    per_token = seconds[: len(tokens)] / (len(counts) + tokens)
    best = int(np.argmin(per_token))
    if per_token[best] * (1 + LEAST_GAIN) >= per_token[0]:
        best = 0
    best = min(best, max(int(np.searchsorted(worst, worst[0] + max_loss, "right")) - 1, 1))
    return np.bincount(np.repeat(np.arange(len(counts)), counts)[order[:best]], None, len(counts))


_FIRST_SHARE, _LAST_SHARE = 0.02, 0.005
_INITIAL_SEARCHES, _INITIAL_ITERATIONS = 3.0, 0.2
"""The initial budget: fruitless searches that it pays for, plus a share of an iteration."""
_LIMIT = 4.0  # most that the budget holds beyond the initial one, in iterations


class Budget:
    """A trial searches while its budget is positive; savings refill it (capped), losses drain it.

    After a trial that made a loss, search pauses until the loss is less than a share of the time
    since. The share is halved after each such trial, from 2% to 0.5%: drafting that begins to pay
    is soon tried, and losses stay below the last share, except for a few initial budgets. The pause
    ends when the number of sequences has halved: few rows make drafts cheap."""

    def __init__(self) -> None:
        self._left: float | None = None
        """Seconds left of the running trial's budget; None: between two trials."""
        self._lost = self._pause = 0.0
        """Seconds that the running trial has lost; seconds until the next."""
        self._share = _FIRST_SHARE
        self._tried_with = 0  # sequences at the last search
        self._search = 0.0  # estimated seconds of a search; falls at once and rises slowly

    @property
    def is_between_trials(self) -> bool:
        """Whether no trial runs: before the first, or since the last used up its budget."""
        return self._left is None

    def allows_search(self, sequences: int) -> bool:
        """Whether to search now, with so many sequences running."""
        if self.is_between_trials and self._pause > 0 and sequences <= self._tried_with // 2:
            self._pause, self._share = 0.0, _FIRST_SHARE
        return not self.is_between_trials or self._pause <= 0

    def max_loss(self, plain: float) -> float:
        """Return the seconds that an iteration may lose; `plain`: its seconds without drafts."""
        return self._initial(plain) if self._left is None else self._left

    def _initial(self, plain: float) -> float:
        return _INITIAL_SEARCHES * self._search + _INITIAL_ITERATIONS * plain

    def rested(self, seconds: float) -> None:
        """Record an iteration without a search, which took `seconds`."""
        self._pause -= seconds

    def searched(self, sequences: int, *, search: float, saved: float, plain: float) -> None:
        """Record an iteration with a search; all times in seconds. `search`: of the search.
        `saved`: by drafting, `search` included; negative for a loss. `plain`: of an iteration
        without drafts."""
        if not self._search:
            # The first search also loads all compiled code, so later ones are faster.
            loading = max(search - _INITIAL_ITERATIONS * plain, 0.0)
            search, saved = search - loading, saved + loading
        self._search = min(search, 0.8 * (self._search or search) + 0.2 * search)
        initial = self._initial(plain)
        if self._left is None:
            self._left, self._lost = initial, 0.0
        self._tried_with = sequences
        self._left = min(self._left + saved, initial + _LIMIT * plain)
        self._lost -= saved
        if self._left >= initial + plain:
            self._share, self._lost, self._pause = _FIRST_SHARE, 0.0, 0.0
        if self._left <= 0:
            self._pause = max(self._lost, initial) / self._share
            self._share = max(self._share / 2, _LAST_SHARE)
            self._left = None


_SMALLEST = 2  # tokens of a window


class Aimd:
    """Each sequence's window: 2 tokens, two more after a fully accepted draft, back to 2 after a
    rejection (RhymeRL, arXiv 2508.18588, section on HistoSpec)."""

    def __init__(self, max_sequences: int, max_draft: int) -> None:
        self.sizes = np.full(max_sequences, _SMALLEST)  # in tokens, by handle
        self._max_draft = max_draft

    def begin(self, handle: int) -> None:
        """Reset the window of a handle that stands for a new sequence."""
        self.sizes[handle] = _SMALLEST

    def observe(self, handles: Ints, lengths: Ints, accepted: Ints) -> None:
        """Update windows: of sequence i's lengths[i] drafted tokens, accepted[i] were accepted."""
        handles, whole = handles[lengths > 0], (accepted >= lengths)[lengths > 0]
        larger = np.minimum(self.sizes[handles] + 2, self._max_draft)
        self.sizes[handles] = np.where(whole, larger, _SMALLEST)
