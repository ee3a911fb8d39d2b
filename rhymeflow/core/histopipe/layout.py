"""HistoPipe's layout of a step: which groups go to which instances (arXiv 2508.18588, HistoPipe).

Groups are ranked by expected length and cut into ranking groups of equal size, each of which gets
some instances. Even steps go from short to long, odd steps from long to short (tier 1,
`pipeline.py`), so that an instance that had long responses has short ones next, and begins them
while others are still at this step. A ranking group gets as many instances as make completion times
grow linearly from the shortest to the longest, `slope * high` to `high` (tier 2); for each of some
slopes the least `high` is found by bisection. Two steps in a row take an instance about `slope *
high + high`, which the choice of the slope minimises.

**Completion times** are of responses of known lengths that an instance begins together, by the cost
model (`core/cost.py`), summed. If there are more than can run at a time, all places are taken until
only that many are left: the longest, which then begin together. That lies between the longest first
(less by up to a quarter) and the shortest first (more by some hundredths).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise
from typing import NamedTuple

from rhymeflow.core.cost import CostModel
from rhymeflow.core.types import GroupId

RANKING_GROUPS = 8
"""At most; as many as there are instances, if that is fewer."""
SLOPES = (1.0, 0.85, 0.7, 0.55, 0.4, 0.25)
"""The shortest completion time over the longest, as far as they are tried."""
HALVINGS = 12
"""Of the bisection: 2 to the power of minus this is what completion times are known to."""


class Ranked(NamedTuple):
    """A group, and what is expected of it."""

    group: GroupId
    prompt_tokens: int
    lengths: tuple[float, ...]
    """Tokens that its responses are expected to have, in ascending order."""

    @property
    def mean(self) -> float:
        """Mean of these."""
        return sum(self.lengths) / len(self.lengths)


class Share(NamedTuple):
    """A ranking group, and how many instances it gets."""

    groups: tuple[GroupId, ...]
    num_instances: int


def lay_out(
    groups: Sequence[Ranked], num_instances: int, cost: CostModel, places: int
) -> list[Share]:
    """Cut the groups into ranking groups, the shortest first, and give each its instances.

    `places`: trajectories that an instance decodes at a time.
    """
    count = min(RANKING_GROUPS, num_instances, len(groups))
    ranked = iter(sorted(groups, key=lambda g: (g.mean, g.group)))
    parts = [list(islice(ranked, size)) for size in _even(count, len(groups))]
    numbers = _balanced(parts, num_instances, cost, places)
    return [
        Share(tuple(each.group for each in part), number)
        for part, number in zip(parts, numbers, strict=True)
    ]


def completion_time(
    part: Sequence[Ranked], num_instances: int, cost: CostModel, places: int
) -> float:
    """Seconds that so many instances take for these groups, their members dealt out by length."""
    lengths = sorted((x for ranked in part for x in ranked.lengths), reverse=True)
    prompt_tokens = sum(ranked.prompt_tokens for ranked in part) / len(part)
    return duration(cost, lengths[::num_instances][::-1], prompt_tokens, places)


def duration(cost: CostModel, lengths: Sequence[float], prompt_tokens: float, places: int) -> float:
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


def _even(count: int, total: int) -> list[int]:
    cuts = [round(i * total / count) for i in range(count + 1)]
    return [b - a for a, b in pairwise(cuts)]


def _balanced(
    parts: Sequence[Sequence[Ranked]], num_instances: int, cost: CostModel, places: int
) -> list[int]:
    """Instances for each part so that completion times grow linearly; see the docstring above."""
    times = [
        [completion_time(part, n, cost, places) for n in range(1, num_instances - len(parts) + 2)]
        for part in parts
    ]
    best: tuple[float, list[int]] | None = None
    for slope in SLOPES:
        low, high = 0.0, max(each[0] for each in times) / slope  # one instance each will do
        found = [1] * len(parts)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            numbers = _enough(times, middle, slope)
            if numbers is None or sum(numbers) > num_instances:
                low = middle
            else:
                high, found = middle, numbers
        if best is None or high * (1 + slope) < best[0]:
            best = (high * (1 + slope), found)
    assert best is not None
    return _spread(times, best[1], num_instances)


def _enough(times: Sequence[Sequence[float]], high: float, slope: float) -> list[int] | None:
    """The fewest instances for each part to be complete by its time; None: there is no number."""
    numbers = []
    for index, of_part in enumerate(times):
        rank = index / (len(times) - 1) if len(times) > 1 else 1.0
        limit = high * (slope + (1 - slope) * rank)
        number = next((n for n, seconds in enumerate(of_part, 1) if seconds <= limit), None)
        if number is None:
            return None
        numbers.append(number)
    return numbers


def _spread(times: Sequence[Sequence[float]], numbers: list[int], num_instances: int) -> list[int]:
    """Give the instances that are left to the parts that gain most."""
    numbers = list(numbers)
    for _ in range(num_instances - sum(numbers)):
        gains = [of_part[n - 1] - of_part[min(n, len(of_part) - 1)] for of_part, n in
                 zip(times, numbers, strict=True)]  # fmt: skip
        numbers[max(range(len(gains)), key=lambda i: (gains[i], i))] += 1
    return numbers
