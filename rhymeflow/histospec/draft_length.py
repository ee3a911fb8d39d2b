"""How many tokens are drafted for each sequence: two rules with one interface.

A rule says before the search how many tokens it could use for each sequence (`most`), after the
search how many of those found are verified (`cut`), and hears what became of them (`observe`).

- `Aimd`: starts at 2, two more after a draft that was accepted whole, back to 2 after a rejection
  (RhymeRL, arXiv 2508.18588, section on HistoSpec).
- `Cost`: of all nodes of all sequences those that make the most tokens per second.

**`Cost` is exact for its model.** A node's path probability is the chance that it and all before it
are accepted, so nodes S add sum(path probability over S) tokens to the one that each sequence makes
anyway, and an iteration with m drafted tokens takes T(m) seconds. For a given m the sum is largest
for the m nodes of the largest path probability, and as a node's is at most its parent's these are
closed under parents. So the best of all choices is among the cuts of the nodes sorted by it, and
all of them are looked at, whatever the form of T. If the best is hardly better than none, it is
none.

**Prompts that are prefilled** in the same iteration take their time whatever is drafted. So the
value of a second, in tokens, is found as if sequences ran alone, and the cut is the one whose
tokens are worth most beyond the seconds that it adds. Without prompts this is the same cut.

**What may be lost is limited.** If nothing is accepted, a draft costs all that it adds to the
iteration, and as long as little is known of prices, more than the model says. Only cuts of which
that is no more than `max_loss` are looked at, or a single token.

Holds true: a rule never gives a sequence more than was found for it. Knows nothing of tokens.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numba import njit
from numpy.typing import NDArray

LEAST_GAIN = 0.02
"""Gains below this share are less than times are known to, and are left alone."""
SMALLEST = 2

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Probabilities = NDArray[np.float32]


class Times(NamedTuple):
    """What drafted tokens cost in one iteration."""

    seconds: Floats
    """Of the iteration with 0, 1, ... drafted tokens, to at least as many as were found."""
    alone: Floats
    """The same if no prompts were prefilled in it."""
    doubt: float = 0.0
    """Seconds that a drafted token may cost beyond that."""
    max_loss: float = np.inf
    """Seconds that may be lost, should it be so."""
    acceptance_discount: float = 1.0
    """The share of the expected tokens that is reckoned with."""


class Rule(Protocol):
    """Decides how many tokens are drafted."""

    uses_times: bool
    """Whether `cut` looks at `times`."""

    def begin(self, handle: int) -> None:
        """The handle stands for a new sequence from now on."""
        ...

    def most(self, handles: Ints, max_tokens: Ints) -> Ints:
        """Tokens worth searching for, at most `max_tokens`."""
        ...

    def cut(self, path_probability: Probabilities, counts: Ints, times: Times | None) -> Ints:
        """Tokens to verify: of each row of `path_probability` [n, W] the first so many.

        At most `counts`. `times` is None if this rule does not use them.
        """
        ...

    def observe(self, handles: Ints, lengths: Ints, accepted: Ints) -> None:
        """Of each sequence's `lengths` verified tokens, `accepted` were."""
        ...


class Aimd:
    """Two more, or back to two."""

    uses_times = False

    def __init__(self, *, max_sequences: int, max_draft: int) -> None:
        self._sizes = np.full(max_sequences, min(SMALLEST, max_draft), np.int64)
        self._max_draft = max_draft

    def begin(self, handle: int) -> None:
        """The handle stands for a new sequence from now on."""
        self._sizes[handle] = min(SMALLEST, self._max_draft)

    def most(self, handles: Ints, max_tokens: Ints) -> Ints:
        """Tokens worth searching for: the window."""
        return np.minimum(self._sizes[handles], max_tokens)

    def cut(self, path_probability: Probabilities, counts: Ints, times: Times | None) -> Ints:
        """All that was found."""
        return counts

    def observe(self, handles: Ints, lengths: Ints, accepted: Ints) -> None:
        """Change the windows of sequences that had a draft."""
        drafted = lengths > 0
        handles, whole = handles[drafted], accepted[drafted] >= lengths[drafted]
        larger = np.minimum(self._sizes[handles] + 2, self._max_draft)
        self._sizes[handles] = np.where(whole, larger, min(SMALLEST, self._max_draft))


class Cost:
    """As many, and for those sequences, as make the most tokens per second."""

    uses_times = True

    def __init__(self, *, max_draft: int) -> None:
        self._max_draft = max_draft

    def begin(self, handle: int) -> None:
        """Nothing is kept of a sequence."""

    def most(self, handles: Ints, max_tokens: Ints) -> Ints:
        """Tokens worth searching for: whatever there is."""
        return np.minimum(max_tokens, self._max_draft)

    def cut(self, path_probability: Probabilities, counts: Ints, times: Times | None) -> Ints:
        """The cut with the most tokens per second; the shortest of equals."""
        assert times is not None
        is_node = np.arange(path_probability.shape[1]) < counts[:, None]
        sorted_nodes = np.sort(path_probability[is_node].astype(np.float64))
        size = _best_size(sorted_nodes, len(counts), *times)
        return _likeliest(path_probability, counts, sorted_nodes, size)

    def observe(self, handles: Ints, lengths: Ints, accepted: Ints) -> None:
        """Nothing is kept of a sequence."""


@njit(cache=True)
def _best_size(sorted_nodes, sequences, seconds, alone, doubt, max_loss, acceptance_discount):
    """How many nodes to take, given their path probabilities in rising order."""
    price = best = alone[0] / sequences  # seconds per token
    tokens, largest = np.zeros(len(sorted_nodes) + 1), 0
    for size in range(1, len(sorted_nodes) + 1):
        gained = acceptance_discount * sorted_nodes[len(sorted_nodes) - size]
        tokens[size] = tokens[size - 1] + gained
        if size > 1 and seconds[size] - seconds[0] + doubt * size > max_loss:
            break
        largest = size
        best = min(best, alone[size] / (sequences + tokens[size]))
    chosen, most = 0, 0.0
    if best * (1 + LEAST_GAIN) >= price:
        return chosen
    for size in range(1, largest + 1):
        value = tokens[size] * best - (seconds[size] - seconds[0])
        if value > most:
            most, chosen = value, size
    return chosen


@njit(cache=True)
def _likeliest(path_probability, counts, sorted_nodes, chosen):
    """The `chosen` likeliest nodes, as lengths."""
    lengths = np.zeros(len(counts), np.int64)
    if not chosen:
        return lengths
    least = sorted_nodes[len(sorted_nodes) - chosen]
    # Of the nodes exactly as likely as the last one taken, the first ones.
    ties = chosen - (len(sorted_nodes) - np.searchsorted(sorted_nodes, least, side="right"))
    for i in range(len(counts)):
        while lengths[i] < counts[i]:
            value = path_probability[i, lengths[i]]
            if value < least or (value == least and ties == 0):
                break
            ties -= value == least
            lengths[i] += 1
    return lengths


def make_rule(name: str, *, max_sequences: int, max_draft: int) -> Rule:
    """The rule called `aimd` or `cost`."""
    if name == "cost":
        return Cost(max_draft=max_draft)
    assert name == "aimd", name
    return Aimd(max_sequences=max_sequences, max_draft=max_draft)


__all__ = ["LEAST_GAIN", "Aimd", "Cost", "Rule", "Times", "make_rule"]
