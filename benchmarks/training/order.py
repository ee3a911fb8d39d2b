"""Whether a schedule trains on short responses earlier than they were requested.

After k batches of B groups a synchronous run has trained on the first k B groups requested,
whatever their lengths. Another schedule may have trained on others, and a group that overtakes
tends to be short. The figure: how much longer than the groups requested by then are the groups
trained on by then, mean over k, in tokens per response. A group's length counts relative to the
mean of the groups requested for the same batch, so that lengths that change while the policy learns
don't count as order. 0 by construction for `synchronous`. Groups that were never trained on are no
part of it:
`trained_share` counts them.

The standard error takes groups as independent. A deviation is within sampling error if it is below
`limit` standard errors: what the largest of so many comparisons stays below in 95 of 100
repetitions without bias (Bonferroni).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.training.log import Run

LEVEL = 0.95


@dataclass(frozen=True)
class Deviation:
    """A figure that is 0 without bias, and its standard error."""

    value: float
    error: float

    @property
    def errors(self) -> float:
        """How many standard errors it is, without its sign."""
        if self.value == 0:
            return 0.0
        return abs(self.value) / self.error if self.error else math.inf


def limit(comparisons: int) -> float:
    """Standard errors that the largest of so many stays below with probability `LEVEL`."""
    return statistics.NormalDist().inv_cdf(1 - (1 - LEVEL) / (2 * comparisons))


def trained_share(runs: Sequence[Run], num_epochs: int) -> float:
    """Share of the groups of these epochs that were trained on."""
    groups = [g for run in runs for g in run.groups if g.epoch < num_epochs]
    return sum(group.batch is not None for group in groups) / len(groups)


def deviation(runs: Sequence[Run], num_epochs: int) -> Deviation:
    """Tokens per response by which trained groups are longer than requested ones; see above."""
    terms, num_steps = [], 0
    for run in runs:
        placed = list(_placed(run, num_epochs))
        steps = max((place for _, place, _ in placed), default=-1) + 1
        size = sum(place == 0 for _, place, _ in placed)
        num_steps += steps
        for batch, place, length in placed:
            ahead = [((batch < k) - (place < k)) / (k * size) for k in range(1, steps + 1)]
            terms.append(length * sum(ahead))
    if not terms:
        return Deviation(0.0, 0.0)
    error = statistics.pstdev(terms) * math.sqrt(len(terms))
    return Deviation(sum(terms) / num_steps, error / num_steps)


def _placed(run: Run, num_epochs: int) -> Iterator[tuple[int, int, float]]:
    """Of each trained group: its batch, the batch it was requested for, its relative length."""
    trained = [group for group in run.groups if group.batch is not None]
    size = sum(group.batch == 0 for group in trained)
    for place in range(len(trained) // size):
        groups = trained[place * size : (place + 1) * size]
        mean = statistics.fmean(group.length for group in groups)
        for group in groups:
            if group.epoch < num_epochs:
                assert group.batch is not None
                yield group.batch, place, group.length - mean
