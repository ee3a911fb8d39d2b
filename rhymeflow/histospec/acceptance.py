"""How likely a drafted token is accepted, given that the one before it was: learned while it runs.

What is known of a token when it is proposed puts it into a bucket: its share of the votes, the
state of its sequence, where the text comes from and how long the match is. The state is part of it
because a response that has left what was proposed for it leaves it again sooner than others do.

A bucket's rate is estimated from what became of its tokens and, as long as there were few, from the
group of buckets that it belongs to: with h of n tokens accepted it is (h + s p) / (n + s), where p
is the estimate for the group, found in the same way from a larger one. The groups are the buckets
that agree in the share of the votes; in that and the state; in these two and the kind of text. The
largest begin with the share of the votes itself.

One walk over the proposals, when it is known what the engine generated, learns all of it: the
rates, the states of the sequences, and how many of the verified tokens were accepted. A proposed
token counts if its parent came true and the response went on as far, verified or not (the engine
makes the same tokens with drafts as without), so the rates do not depend on what is chosen to be
verified.

What is chosen does: of much that is uncertain the best looking comes true less often than it looks,
and siblings are wrong together. `discount` is the share of the tokens expected of verified drafts
that came, and begins below 1.

Holds true: rates lie in (0, 1). Knows nothing of how drafts are found, or of time.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhymeflow.histospec.build_draft import Proposals

NUM_SHARES = 8
"""Share of the votes, smoothed by one vote that no token gets, in eighths."""

BEGUN, FOLLOWS, UNKNOWN, LEFT_LATELY, LEFT_BEFORE = range(5)
"""States of a sequence: nothing was proposed to it yet; it has followed every proposal; it went on
without proposals, so it is not known; it left one within the last few tokens; longer ago."""
NUM_STATES = 5

NUM_KINDS = 4
"""The text is of another prompt, of the same prompt, the sequence's own, aligned (of the same
prompt, sample and noise, at the same position)."""

_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # least match of each class
NUM_LENGTHS = len(_LENGTHS)

SHAPE = (NUM_SHARES, NUM_STATES, NUM_KINDS, NUM_LENGTHS)
NUM_BUCKETS = NUM_SHARES * NUM_STATES * NUM_KINDS * NUM_LENGTHS

NUMBERS = np.arange(NUM_BUCKETS, dtype=np.int32).reshape(SHAPE)
"""int32 [shares, states, kinds, lengths]: the numbers of the buckets."""

LENGTH_CLASSES = (np.searchsorted(_LENGTHS, np.arange(33), side="right") - 1).astype(np.int64)
"""int64 [33]: the class of each matched length."""


def bucket(share: float, state: int, kind: int, matched: int) -> int:
    """Return the bucket of a token (`build_draft.py` has the same, compiled)."""
    agreed = min(int(share * NUM_SHARES), NUM_SHARES - 1)
    return int(NUMBERS[agreed, state, kind, LENGTH_CLASSES[min(matched, 32)]])


_GROUP_SIZES = np.array([int(np.prod(SHAPE[level:])) for level in range(1, 5)])
"""Buckets in a group, the largest groups first: a bucket's number over this is its group's."""
_PER_SHARE = int(_GROUP_SIZES[0])
_STRENGTH = 8.0
"""Trials that a group's estimate counts for in its members'."""
_MEMORY = 2000.0
"""Trials after which those of a group are halved, so that the estimates follow the policy."""
_STATE_PRIOR = np.array([1.0, 1.0, 0.8, 0.7, 0.8])
"""By state: how much less its tokens are taken to be accepted than others, to begin with."""
_LATELY = 4
"""Tokens after which leaving a proposal is no longer lately."""

_DISCOUNT = 0.85
_DISCOUNT_STRENGTH = 20.0
"""Tokens that it counts for."""
_DISCOUNT_FADE = 0.99
"""Per search: a bad time is not held against drafts for ever."""

Ints = NDArray[np.int64]


class Acceptance:
    """Rates by bucket, states by handle; `rates` float32 [NUM_BUCKETS] is changed in place."""

    def __init__(self, max_sequences: int) -> None:
        share = np.arange(NUM_BUCKETS) // _PER_SHARE
        self.rates = np.empty(NUM_BUCKETS, np.float32)
        self._priors = (np.arange(NUM_SHARES) + 0.5) / NUM_SHARES
        self._trials = np.zeros((len(_GROUP_SIZES), NUM_BUCKETS, 2))
        """By level and group: trials, and how many of them were accepted."""
        self._states = np.full(max_sequences, -1 - BEGUN, np.int64)
        """Tokens since the sequence left a proposal; -1 - state: it did not."""
        self._expected = self._came = 0.0
        """Of tokens that were verified."""
        _estimate(np.unique(share), self._priors, self._trials, self.rates)

    @property
    def discount(self) -> float:
        """The share of the expected tokens that may be reckoned with, at most 1."""
        came = self._came + _DISCOUNT * _DISCOUNT_STRENGTH
        return min(came / (self._expected + _DISCOUNT_STRENGTH), 1.0)

    def begin(self, handle: int) -> None:
        """The handle stands for a new sequence from now on."""
        self._states[handle] = -1 - BEGUN

    def states(self, handles: Ints) -> Ints:
        """The states of these sequences, as they are numbered above."""
        since = self._states[handles]
        left = np.where(since <= _LATELY, LEFT_LATELY, LEFT_BEFORE)
        return np.where(since < 0, -1 - since, left)

    def went_on(self, handles: Ints) -> None:
        """These got a token, and nothing was proposed to them."""
        since = self._states[handles]
        self._states[handles] = np.where(since < 0, -1 - UNKNOWN, since + 1)

    def observe(
        self,
        proposals: Proposals,
        lengths: Ints,
        rows: Ints,
        handles: Ints,
        generated: NDArray[np.int32],
        offsets: Ints,
    ) -> Ints:
        """Learn from what came of proposals; return accepted tokens by sequence, int64 [n].

        Sequence handles[i] got `generated[offsets[i]:offsets[i + 1]]`; its proposal is in `rows[i]`
        (-1: there was none). Of proposal j the first `lengths[j]` tokens were verified.
        """
        accepted = np.zeros(len(rows), np.int64)
        touched = _walk(
            proposals.tokens, proposals.parents, proposals.buckets, proposals.counts, lengths,
            rows, handles, generated, offsets, self._states, self._trials, accepted,
        )  # fmt: skip
        _estimate(np.flatnonzero(touched), self._priors, self._trials, self.rates)
        verified = np.arange(proposals.tokens.shape[1]) < lengths[:, None]
        self._expected *= _DISCOUNT_FADE
        self._came *= _DISCOUNT_FADE
        self._expected += float(proposals.path_probability[verified].sum())
        self._came += int(accepted.sum())
        return accepted


@njit(cache=True)
def _walk(
    tokens, parents, numbers, counts, lengths,
    rows, handles, generated, offsets, states, trials, accepted,
):  # fmt: skip
    """Count trials, set states, fill `accepted`; return whether each share had a trial."""
    touched = np.zeros(NUM_SHARES, np.bool_)
    depth = np.empty(tokens.shape[1], np.int64)
    for i in range(len(rows)):
        row, size = rows[i], offsets[i + 1] - offsets[i]
        count = counts[row] if row >= 0 else 0
        deepest, refused = 0, -1
        for node in range(count):
            parent = parents[row, node]
            depth[node] = -1  # kept for a node that did not come true
            place = 0 if parent < 0 else depth[parent] + 1
            if place >= size or (parent >= 0 and depth[parent] < 0):
                continue
            is_right = tokens[row, node] == generated[offsets[i] + place]
            _count(trials, numbers[row, node], is_right)
            touched[numbers[row, node] // _PER_SHARE] = True
            if is_right:
                depth[node] = place
                deepest = max(deepest, place + 1)
                accepted[i] += node < lengths[row]
            else:
                refused = max(refused, place)
        has_left = count > 0 and refused >= deepest
        states[handles[i]] = _next_state(states[handles[i]], size, count, has_left, deepest)
    return touched


@njit(cache=True)
def _count(trials, number, is_right):
    for level in range(len(_GROUP_SIZES)):
        group = trials[level, number // _GROUP_SIZES[level]]
        if group[0] >= _MEMORY:
            group *= 0.5
        group[0] += 1
        group[1] += is_right


@njit(cache=True)
def _next_state(since, size, count, has_left, deepest):
    """Of a sequence that got `size` tokens, the first `deepest` as one of `count` proposed."""
    if has_left:
        return size - deepest - 1
    if since >= 0:
        return since + size
    if count == 0:
        return -1 - UNKNOWN
    return -1 - FOLLOWS if since == -1 - BEGUN else since


@njit(cache=True)
def _estimate(shares, priors, trials, rates):
    """Estimate the rates of all buckets with these shares of the votes."""
    levels = len(_GROUP_SIZES)
    for share in shares:
        for number in range(share * _PER_SHARE, (share + 1) * _PER_SHARE):
            rate = priors[share]
            for level in range(levels):
                if level == 1:
                    rate *= _STATE_PRIOR[number // _GROUP_SIZES[1] % NUM_STATES]
                group = trials[level, number // _GROUP_SIZES[level]]
                rate = (group[1] + _STRENGTH * rate) / (group[0] + _STRENGTH)
            rates[number] = rate


__all__ = [
    "BEGUN",
    "FOLLOWS",
    "LEFT_BEFORE",
    "LEFT_LATELY",
    "LENGTH_CLASSES",
    "NUMBERS",
    "NUM_BUCKETS",
    "NUM_KINDS",
    "NUM_LENGTHS",
    "NUM_SHARES",
    "NUM_STATES",
    "SHAPE",
    "UNKNOWN",
    "Acceptance",
    "bucket",
]
