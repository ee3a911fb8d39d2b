"""Whether a schedule favours responses by their length.

What a schedule could do to long responses is drop them or put them off. It cannot make them shorter
(law 3), but after the first step its policy is another than `synchronous` has, so lengths are not
compared between runs as they are. Two questions, both against chance:

*Endings.* Each response has a class that no schedule has a say in: the fifth in which the response
of the same prompt, epoch and member lies by length in the `synchronous` run of the same seed, which
leaves none out. (By its own length an aborted or unfinished response would count as shorter than it
is.) In each class the shares of endings are compared with those of `synchronous`. Only the first
epochs count, and runs go on for `bound + 2` steps after them: whatever is in flight when a run ends
is long, under any schedule, because the long ones take longest; what is *still* unfinished of an
epoch that is over has been put off for good.

*Order.* After k batches of B groups `synchronous` has consumed the first k B groups drawn, whatever
their lengths; another schedule may have consumed others, and those that overtake are short where
nothing is done about it. So: how much longer than what has been drawn by then is what has been
consumed, mean over k, in tokens a response? Lengths are those of the run itself, less the mean of
the groups drawn for the same batch, so that lengths that change while the policy learns do not
count as order. 0 by construction for `synchronous`. Groups without a batch (aborted, filtered,
unfinished) are no part of it.

Both are differences with a standard error: groups (prompt, epoch, seed; the members of one hang
together) are drawn again with replacement, the same ones on both sides. A deviation is within
sampling error if it is fewer standard errors than `limit` says: as many as the largest of so many
comparisons stays below in 95 of 100 repetitions without any bias (Bonferroni). A difference without
spread, every group alike, is none or infinite.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from benchmarks.real_schedules.runs import Group, Run

NUM_CLASSES = 5
ENDINGS = ("consumed", "filtered", "aborted", "unfinished")
RESAMPLES = 1000
LEVEL = 0.95

Floats = npt.NDArray[np.float64]
Key = tuple[int, int, int]
"""Seed, prompt, epoch."""


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
    """Standard errors that the largest of so many stays below with chance `LEVEL`."""
    return statistics.NormalDist().inv_cdf(1 - (1 - LEVEL) / (2 * comparisons))


def count(runs: Sequence[Run], reference: Sequence[Run], num_epochs: int) -> dict[Key, Floats]:
    """Members by class and ending, [NUM_CLASSES, len(ENDINGS)], of each group of these epochs.

    Args:
        runs: of one side, in the order of seeds.
        reference: of `synchronous`, for the same seeds.
    """
    counts: dict[Key, Floats] = {}
    for seed, (run, other) in enumerate(zip(runs, reference, strict=True)):
        class_of = classes(other.groups, num_epochs)
        for group in run.groups:
            if group.epoch >= num_epochs:
                continue
            key = (seed, group.row, group.epoch)  # a prompt drawn again is in the same place
            table = counts.setdefault(key, np.zeros((NUM_CLASSES, len(ENDINGS))))
            for member, ending in enumerate(group.endings):
                at = class_of.get((group.row, group.epoch, member))
                if at is not None:  # synchronous made no such surplus member
                    table[at, ENDINGS.index(ending)] += 1
    return counts


def classes(groups: Sequence[Group], num_epochs: int) -> dict[tuple[int, int, int], int]:
    """(prompt, epoch, member) -> which fifth by length it is in, 0 the shortest."""
    lengths = {
        (group.row, group.epoch, member): length
        for group in groups
        if group.epoch < num_epochs
        for member, length in enumerate(group.lengths)
    }
    ordered = sorted(lengths, key=lambda key: (lengths[key], key))
    return {key: at * NUM_CLASSES // len(ordered) for at, key in enumerate(ordered)}


def shares(counts: Mapping[Key, Floats]) -> Floats:
    """Of each class, the share of each ending: [NUM_CLASSES, len(ENDINGS)]."""
    total = sum(counts.values(), np.zeros((NUM_CLASSES, len(ENDINGS))))
    return total / total.sum(axis=1, keepdims=True)


def endings(ours: Mapping[Key, Floats], theirs: Mapping[Key, Floats]) -> list[list[Deviation]]:
    """Differences of shares, by class and ending."""
    keys = sorted(set(ours) | set(theirs))
    none = np.zeros((NUM_CLASSES, len(ENDINGS)))
    tables = [np.stack([side.get(key, none) for key in keys]) for side in (ours, theirs)]
    weights = _weights(len(keys))

    def difference(each: Floats) -> Floats:
        one, other = (np.tensordot(each, table, axes=1) for table in tables)
        return one / one.sum(-1, keepdims=True) - other / other.sum(-1, keepdims=True)

    value = difference(np.ones(len(keys)))
    error = difference(weights).std(axis=0, ddof=1)
    return [
        [Deviation(float(v), float(e)) for v, e in zip(*rows, strict=True)]
        for rows in zip(value, error, strict=True)
    ]


def order(runs: Sequence[Run], num_epochs: int) -> Deviation:
    """Tokens a response that is consumed is longer than one that has been drawn; see above."""
    parts = [_terms(run, num_epochs) for run in runs]
    terms = np.concatenate([part for part, _ in parts])
    num_steps = sum(steps for _, steps in parts)
    if not len(terms):
        return Deviation(0.0, 0.0)
    value = terms.sum() / num_steps
    error = (_weights(len(terms)) @ terms).std(ddof=1) / num_steps
    return Deviation(float(value), float(error))


def out_of_order(runs: Sequence[Run], num_epochs: int) -> float:
    """Share of the groups that were trained on in another batch than in order."""
    moved = [group.batch != place for run in runs for group, place, _ in _in_order(run, num_epochs)]
    return statistics.fmean(moved)


def delays(runs: Sequence[Run], num_epochs: int) -> list[float]:
    """Mean steps that groups are trained on later than in order, by fifth of their length."""
    late = sorted(
        (residual, group.batch - place)
        for run in runs
        for group, place, residual in _in_order(run, num_epochs)
        if group.batch is not None
    )
    cuts = [round(i * len(late) / NUM_CLASSES) for i in range(NUM_CLASSES + 1)]
    return [statistics.fmean(delay for _, delay in late[a:b]) for a, b in pairwise(cuts) if a < b]


def _terms(run: Run, num_epochs: int) -> tuple[Floats, int]:
    """What each group adds to the sum over k of consumed less drawn, and the number of k."""
    placed = _in_order(run, num_epochs)
    num_steps = max((place for _, place, _ in placed), default=-1) + 1
    size = sum(place == 0 for _, place, _ in placed)
    terms = np.zeros(len(placed))
    for at, (group, place, residual) in enumerate(placed):
        assert group.batch is not None
        for k in range(1, num_steps + 1):
            terms[at] += residual * ((group.batch < k) - (place < k)) / (k * size)
    return terms, num_steps


def _in_order(run: Run, num_epochs: int) -> list[tuple[Group, int, float]]:
    """Groups trained on, the batch they would be in by order, and how much longer than its mean."""
    size = sum(group.batch == 0 for group in run.groups)
    trained = [group for group in run.groups if group.batch is not None]
    found = []
    for place in range(len(trained) // size):
        batch = trained[place * size : (place + 1) * size]
        lengths = [statistics.fmean(group.lengths) for group in batch]
        mean = statistics.fmean(lengths)
        found += [
            (group, place, length - mean)
            for group, length in zip(batch, lengths, strict=True)
            if group.epoch < num_epochs
        ]
    return found


def _weights(num_groups: int) -> Floats:
    """How often each group is drawn, of as many: [RESAMPLES, num_groups]."""
    noise = np.random.default_rng(0)
    even = np.full(num_groups, 1 / num_groups)
    return noise.multinomial(num_groups, even, size=RESAMPLES).astype(float)
