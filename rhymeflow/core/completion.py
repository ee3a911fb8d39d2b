"""How long an instance takes for responses of known lengths that it begins together.

By the cost model (`cost.py`), summed: while n decode, an iteration costs max(k2, k3 n + c) + k4,
and every response costs k1 for each of its tokens in the cache at each of its iterations. If there
are more than can run at a time, all places are taken until only that many are left: the longest
ones, which then begin together. That lies between the longest first (less by up to a quarter) and
the shortest first (more by some hundredths). Pure arithmetic. Knows nothing of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from rhymeflow.core.cost import CostModel


def seconds(cost: CostModel, lengths: Sequence[float], prompt_tokens: float, places: int) -> float:
    """Seconds until responses of these lengths, each after so many prompt tokens, are complete.

    `lengths`: in ascending order. `places`: most that run at a time.
    """
    if not lengths:
        return 0.0
    reading = sum(length * (prompt_tokens + length / 2) for length in lengths)
    waves, last = lengths[:-places], lengths[-places:]
    # What does not fit at first fills places that come free: all of them are taken meanwhile.
    total = cost.k1 * reading + sum(waves) / places * cost.iteration(places, 0)
    done = 0.0
    for index, length in enumerate(last):
        total += (length - done) * cost.iteration(len(last) - index, 0)
        done = length
    return total
