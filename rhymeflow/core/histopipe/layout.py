"""HistoPipe's layout of a step: which groups go to which instances (arXiv 2508.18588, HistoPipe).

Groups are ranked by expected length and cut into ranking groups of equal size, each of which gets
some instances. Even steps go from short to long, odd steps from long to short (tier 1,
`pipeline.py`), so that an instance that had long responses gets short ones next, and begins them
while others still run this step. The instances are distributed so that the ranking groups'
completion times grow linearly from `slope * high` for the shortest to `high` for the longest (tier
2); bisection finds the least `high` of each slope. Two consecutive steps take an instance about
`slope * high + high`; the slope that minimises this is chosen.

**A completion time** is how long an instance takes for responses of known lengths that it begins
together: the seconds of all iterations by the cost model (`core/cost.py`). If there are more
responses than places, all places count as busy until as many responses are left as there are
places; these are the longest, and count as begun together. The result lies between those of
running the longest first (up to a quarter less) and the shortest first (a few per cent more)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise
from typing import NamedTuple

from rhymeflow.core.cost import CostModel
from rhymeflow.core.types import GroupId

RANKING_GROUPS = 8  # most ranking groups; there are never more than instances
SLOPES = (1.0, 0.85, 0.7, 0.55, 0.4, 0.25)
"""The ratios of shortest to longest completion time that are tried."""
HALVINGS = 12  # iterations of the bisection; each halves its error


class Ranked(NamedTuple):
    """A group and its expected lengths."""

    group: GroupId
    prompt_tokens: int
    lengths: tuple[float, ...]  # expected tokens of each response, in ascending order

    @property
    def mean(self) -> float:
        """Mean expected length in tokens."""
        return sum(self.lengths) / len(self.lengths)


class Share(NamedTuple):
    """A ranking group and the number of its instances."""

    groups: tuple[GroupId, ...]
    num_instances: int


def lay_out(
    groups: Sequence[Ranked], num_instances: int, cost: CostModel, places: int
) -> list[Share]:
    """Cut the groups into ranking groups, shortest first, and choose how many instances each gets.
    `places`: trajectories that an instance decodes at a time."""
    count = min(RANKING_GROUPS, num_instances, len(groups))
    ranked = iter(sorted(groups, key=lambda g: (g.mean, g.group)))
    parts = [list(islice(ranked, size)) for size in _equal_sizes(count, len(groups))]
    numbers = _balance(parts, num_instances, cost, places)
    return [
        Share(tuple(each.group for each in part), number)
        for part, number in zip(parts, numbers, strict=True)
    ]


def completion_time(
    part: Sequence[Ranked], num_instances: int, cost: CostModel, places: int
) -> float:
    """Return the seconds that `num_instances` take for these groups, members dealt by length."""
    lengths = sorted((x for ranked in part for x in ranked.lengths), reverse=True)
    prompt_tokens = sum(ranked.prompt_tokens for ranked in part) / len(part)
    return duration(cost, lengths[::num_instances][::-1], prompt_tokens, places)


def duration(cost: CostModel, lengths: Sequence[float], prompt_tokens: float, places: int) -> float:
    """Return the seconds that an instance takes for responses of these lengths, in ascending order.
    `prompt_tokens`: mean tokens of their prompts. `places`: most responses that run at a time."""
    if not lengths:
        return 0.0
    tokens_read = sum(length * (prompt_tokens + length / 2) for length in lengths)
    shorter, last = lengths[:-places], lengths[-places:]
    # A response that ends gives its place to one that waits: all places are busy until `last`.
    seconds = cost.k1 * tokens_read + sum(shorter) / places * cost.iteration(places, 0)
    generated = 0.0  # tokens of each response that still runs
    for index, length in enumerate(last):
        seconds += (length - generated) * cost.iteration(len(last) - index, 0)
        generated = length
    return seconds


def _equal_sizes(count: int, total: int) -> list[int]:
    cuts = [round(i * total / count) for i in range(count + 1)]
    return [b - a for a, b in pairwise(cuts)]


def _balance(
    parts: Sequence[Sequence[Ranked]], num_instances: int, cost: CostModel, places: int
) -> list[int]:
    """Choose each part's number of instances so that completion times grow linearly."""
    # times[i][n - 1]: seconds of part i on n instances.
    times = [
        [completion_time(part, n, cost, places) for n in range(1, num_instances - len(parts) + 2)]
        for part in parts
    ]
    best: tuple[float, list[int]] | None = None
    for slope in SLOPES:
        low, high = 0.0, max(each[0] for each in times) / slope  # one instance each is enough
        enough = [1] * len(parts)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            numbers = _fewest(times, middle, slope)
            if numbers is None or sum(numbers) > num_instances:
                low = middle
            else:
                high, enough = middle, numbers
        if best is None or high * (1 + slope) < best[0]:
            best = (high * (1 + slope), enough)
    assert best is not None
    return _top_up(times, best[1], num_instances)


def _fewest(times: Sequence[Sequence[float]], high: float, slope: float) -> list[int] | None:
    """Return the fewest instances with which each part meets its time limit; None: one cannot."""
    numbers = []
    for index, part_times in enumerate(times):
        rank = index / (len(times) - 1) if len(times) > 1 else 1.0
        limit = high * (slope + (1 - slope) * rank)
        number = next((n for n, seconds in enumerate(part_times, 1) if seconds <= limit), None)
        if number is None:
            return None
        numbers.append(number)
    return numbers


def _top_up(times: Sequence[Sequence[float]], numbers: list[int], num_instances: int) -> list[int]:
    """Give the remaining instances, one by one, to the part that gains most."""
    numbers = list(numbers)
    for _ in range(num_instances - sum(numbers)):
        gains = [
            part_times[n - 1] - part_times[min(n, len(part_times) - 1)]
            for part_times, n in zip(times, numbers, strict=True)
        ]
        numbers[max(range(len(gains)), key=lambda i: (gains[i], i))] += 1
    return numbers
