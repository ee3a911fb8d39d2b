"""Made-up lengths with meaning: every prompt has a level, which drifts a little between epochs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from math import exp, log, sqrt
from statistics import NormalDist

from rhymeflow.core.history import LengthHistory
from rhymeflow.core.types import TrajectoryId

LONGEST = 16_384
_NORMAL = NormalDist()

Group = tuple[int, list[int]]
"""A prompt's row and the lengths of its responses."""


def lognormal(z: float) -> float:
    return exp(7.2 + 0.8 * z)


def bimodal(z: float) -> float:
    """A quarter of the responses think six times as long."""
    return exp(6.8 + 0.4 * z) * (6 if z > 0.674 else 1)


def power_law(z: float) -> float:
    return 700 * _NORMAL.cdf(-z) ** (-1 / 1.7)


class World:
    """Prompts with levels that explain 65% of the variance of the scores of their responses."""

    def __init__(
        self,
        shape: Callable[[float], float] = lognormal,
        *,
        prompts: int = 256,
        members: int = 8,
        seed: int = 0,
    ) -> None:
        self.shape, self.members = shape, members
        self.rng = random.Random(seed)
        self.levels = [self.rng.gauss(0, 1) for _ in range(prompts)]

    def epoch(self, *, shuffled: bool = False, times: float = 1.0) -> Iterator[Group]:
        """Each prompt once, in an order of its own; `shuffled`: with another prompt's level."""
        rng, rows = self.rng, list(range(len(self.levels)))
        levels = list(self.levels)
        rng.shuffle(rows)
        if shuffled:
            rng.shuffle(levels)
        for row in rows:
            yield row, self.responses(levels[row], times)
        self.levels = [0.98 * z + sqrt(1 - 0.98**2) * rng.gauss(0, 1) for z in self.levels]

    def responses(self, level: float, times: float = 1.0) -> list[int]:
        """A group's lengths."""
        scores = [
            sqrt(0.65) * level + sqrt(0.35) * self.rng.gauss(0, 1) for _ in range(self.members)
        ]
        return [min(LONGEST, max(1, round(times * self.shape(z)))) for z in scores]


class Player:
    """Tells a history of groups, a batch at a time; all members of a batch start together."""

    def __init__(self, history: LengthHistory, batch: int = 16) -> None:
        self.history, self.batch = history, batch
        self.next_group = 0

    def play(self, groups: Sequence[Group] | Iterator[Group], epoch: int) -> list[tuple]:
        """Return (expected, q10, q90, length) of each response, as foretold at opening."""
        groups, told = list(groups), []
        for first in range(0, len(groups), self.batch):
            told += self.play_batch(groups[first : first + self.batch], epoch)
        return told

    def play_batch(self, groups: Sequence[Group], epoch: int) -> list[tuple]:
        history, start = self.history, self.next_group
        self.next_group += len(groups)
        told = []
        for group, (row, _) in enumerate(groups, start):
            history.open(group, row, epoch)
        for group, (_, lengths) in enumerate(groups, start):
            low, high = history.quantile(group, 0.1), history.quantile(group, 0.9)
            told += [(history.expected(group), low, high, length) for length in lengths]
        ends = sorted(
            (length, group, member)
            for group, (_, lengths) in enumerate(groups, start)
            for member, length in enumerate(lengths)
        )
        for length, group, member in ends:
            history.finished(TrajectoryId(group, member), length)
        for group in range(start, start + len(groups)):
            history.close(group)
        return told


def log_variance(lengths: Sequence[int]) -> float:
    logs = [log(length) for length in lengths]
    mean = sum(logs) / len(logs)
    return sum((value - mean) ** 2 for value in logs) / len(logs)
