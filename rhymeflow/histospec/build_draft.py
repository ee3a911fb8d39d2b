"""Builds drafts from candidates: their continuations vote, and the likeliest tokens are drafted.

A node of the draft is a token together with the candidates that agree with the path to it (a mask,
one bit per candidate); these vote on the next token. A token's probability, given its parent, is
the acceptance rate of its class, which depends on its share of the votes. Nodes are added best
first, so they are in order of falling path probability, parents before children."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

NUM_SHARES, NUM_STATES, NUM_KINDS = 8, 4, 4
NUM_CLASSES = NUM_SHARES * NUM_STATES * NUM_KINDS
BRANCHES = 4  # most children of a node that are considered
UNCAST = 1.0  # votes for no token, so that a single candidate's token is not certain

# These functions create no arrays: reference counting would take longer than their work.
inner = njit(cache=True, nogil=True, error_model="numpy", _nrt=False, forceinline=True)


class Texts(NamedTuple):
    """Continuations of n sequences: at most P candidates each, W tokens ahead."""

    tokens: np.ndarray  # int32 [n, P, W]
    counts: np.ndarray  # int32 [n, P]: number of each candidate's tokens; 0: there is no candidate
    matched: np.ndarray
    """int32 [n, P]: number of tokens before it that equal the end of the sequence."""
    kinds: np.ndarray  # int32 [n, P]: the candidate's origin, see `kernels`
    merits: np.ndarray  # float32 [n, P]: weight by its response's reward; 1 if that is unknown


class Proposals(NamedTuple):
    """Drafts for n sequences, W = max_draft; only the first counts[i] nodes of row i are valid.
    Nodes are in order of falling path probability, so every prefix of a row is a draft."""

    tokens: np.ndarray  # int32 [n, W]
    parents: np.ndarray
    """int32 [n, W]: index of the parent node; -1: the token follows the sequence."""
    path_probability: np.ndarray
    """float32 [n, W]: estimated chance that the token and all before it are accepted."""
    classes: np.ndarray
    """int32 [n, W]: the class whose rate was used for the token itself, see `class_of`."""
    counts: np.ndarray  # int64 [n]


class Frontier(NamedTuple):
    """Nodes that may be added to the draft; once added, their probability is negative."""

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    classes: np.ndarray
    masks: np.ndarray
    probabilities: np.ndarray


class Ballot(NamedTuple):
    """The votes on the token after one node."""

    weights: np.ndarray  # float32 [P]: by candidate
    tokens: np.ndarray
    """int32 [P]: by option, that is by distinct next token, as are the arrays below."""
    scores: np.ndarray
    shares: np.ndarray
    masks: np.ndarray
    kinds: np.ndarray
    classes: np.ndarray


@njit(cache=True, nogil=True, error_model="numpy", _nrt=False)
def build_drafts(texts, states, most, weights, rates, is_tree, proposals, frontier, ballot):
    """Fill row i of `proposals` with at most most[i] nodes from row i of `texts`.

    `states` int64 [n]: of the sequences, see `control`. `weights` float32 [kinds, LONGEST_MATCH +
    1]: votes of a candidate, by its origin and the number of tokens that match. `rates` float32
    [NUM_CLASSES]: acceptance rates. `frontier` and `ballot` are scratch memory."""
    width = proposals.tokens.shape[1]
    for i in range(most.shape[0]):
        limit, count, frontier_size = min(most[i], width), 0, 0
        mask, parent, depth, path = _weigh(texts, i, weights, ballot), -1, 0, np.float32(1)
        while count < limit:
            if depth < width:
                options = _vote(texts, i, mask, depth, ballot)
                frontier_size = _put(
                    ballot, options, states[i], is_tree, rates, frontier,
                    frontier_size, parent, depth, path,
                )  # fmt: skip
            best = 0
            for j in range(1, frontier_size):
                if frontier.probabilities[j] > frontier.probabilities[best]:
                    best = j
            if frontier_size == 0 or frontier.probabilities[best] < 0:
                break
            mask, depth = frontier.masks[best], frontier.depths[best] + 1
            path, parent = frontier.probabilities[best], count
            proposals.tokens[i, count] = frontier.tokens[best]
            proposals.parents[i, count] = frontier.parents[best]
            proposals.path_probability[i, count] = path
            proposals.classes[i, count] = frontier.classes[best]
            frontier.probabilities[best] = -1.0
            count += 1
        proposals.counts[i] = count


@inner
def _weigh(texts, i, weights, ballot):
    """Set the weight of each candidate; return the mask of all candidates."""
    mask = np.uint64(0)
    for place in range(texts.counts.shape[1]):
        if texts.counts[i, place] > 0:
            kind, matched = texts.kinds[i, place], texts.matched[i, place]
            ballot.weights[place] = weights[kind, matched]
            mask |= np.uint64(1) << np.uint64(place)
    return mask


@inner
def _vote(texts, i, mask, depth, ballot):
    """Let the candidates in `mask` vote on the token at `depth`; return the number of options."""
    options = 0
    for place in range(texts.counts.shape[1]):
        is_voter = (mask >> np.uint64(place)) & np.uint64(1)
        if not is_voter or texts.counts[i, place] <= depth:
            continue
        token = texts.tokens[i, place, depth]
        option = 0
        while option < options and ballot.tokens[option] != token:
            option += 1
        if option == options:
            options += 1
            ballot.tokens[option] = token
            ballot.scores[option] = 0.0
            ballot.masks[option] = np.uint64(0)
            ballot.kinds[option] = 0
        ballot.scores[option] += ballot.weights[place] * texts.merits[i, place]
        ballot.masks[option] |= np.uint64(1) << np.uint64(place)
        ballot.kinds[option] = max(ballot.kinds[option], np.int64(texts.kinds[i, place]))
    return options


@inner
def _put(ballot, options, state, is_tree, rates, frontier, size, parent, depth, path):
    """Add the options with the best chances, which follow node `parent`, to the frontier of `size`
    nodes; return its new size. `path`: the parent's path probability."""
    total = np.float32(UNCAST)
    for option in range(options):
        total += ballot.scores[option]
    for option in range(options):
        ballot.shares[option] = ballot.scores[option] / total
        ballot.classes[option] = class_of(ballot.shares[option], state, ballot.kinds[option])
    for _ in range(min(options, BRANCHES if is_tree else 1)):
        best, chance = -1, np.float32(-1)
        for option in range(options):
            rate = rates[ballot.classes[option]]
            is_better = rate == chance and ballot.shares[option] > ballot.shares[best]
            if ballot.shares[option] >= 0 and (rate > chance or is_better):
                best, chance = option, rate
        ballot.shares[best] = -1.0  # so that it is not chosen again
        frontier.tokens[size] = ballot.tokens[best]
        frontier.parents[size] = parent
        frontier.depths[size] = depth
        frontier.classes[size] = ballot.classes[best]
        frontier.masks[size] = ballot.masks[best]
        frontier.probabilities[size] = path * chance
        size += 1
    return size


@inner
def class_of(share, state, kind):
    """Return the class of a token; one acceptance rate is learned per class.

    It combines the token's share of the votes, the state of its sequence (see `control`), and the
    origin of the text: another prompt, the prompt, the sequence itself, or aligned (a response with
    the same prompt, sample and noise, at the same position)."""
    bin_of_share = min(int(share * NUM_SHARES), NUM_SHARES - 1)
    return (bin_of_share * NUM_STATES + state) * NUM_KINDS + kind
