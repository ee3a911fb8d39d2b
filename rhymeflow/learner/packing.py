"""Packs samples into rows without padding; a prefix that several samples share is computed once.

Each row is one micro-batch: the prompts and responses of some samples, in order. Samples share the
tokens up to where they differ, of prompts and responses alike, as in a tree:

    row        s p p x a a b b q q c      prompts s p p, s q q; responses x a a, x b b, c
    positions  0 1 2 3 4 5 4 5 1 2 3
    sequences  [s p p x a a]  [s p p x b b]  [s q q c]

The gradient of a shared token is the sum over its samples. The last token of a response predicts
nothing and is not in the row. Observations of an environment are in the row, but not predicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rhymeflow.learner.sample import Sample
from rhymeflow.utils.prefixes import Prefixes


@dataclass(frozen=True)
class PackedRow:
    """One micro-batch. T tokens in the row, R sampled response tokens predicted by them."""

    members: tuple[int, ...]  # index of each sequence's sample in the list that was packed
    tokens_T: np.ndarray  # token ids, int64
    positions_T: np.ndarray  # position of each token in its own sequence, int64
    sequences: tuple[np.ndarray, ...]
    """For each member, where its tokens lie in the row, in order, int64."""
    predictors_R: np.ndarray
    """Row index of the token that predicts each sampled one, int64; by member, in order."""
    targets_R: np.ndarray  # the sampled tokens, int64
    lengths: tuple[int, ...]  # sampled tokens of each member; their sum is R
    size_unshared: int  # what T would be if samples shared only a prompt that is the same

    @property
    def num_whole(self) -> int:
        """Tokens of its prompts, each once, and of its responses in full."""
        return self.size_unshared + len(self.members)


def pack(
    samples: Sequence[Sample],
    members: Iterable[int],
    max_tokens: int,
    *,
    counts_copies: bool = False,
) -> list[PackedRow]:
    """Pack `samples[i]` for `i` in `members`, in that order, into rows of at most `max_tokens`.

    Each sample is in exactly one row. A sample that does not fit begins a new row. To decide that,
    responses are counted in full, shared prefixes included, so a row neither holds nor predicts
    more than `max_tokens` tokens; with `counts_copies` prompts too, for models with layers that
    compute what is shared for each sample. A sample that is longer gets a row of its own."""
    rows = []
    row, size = _Builder(), 0
    for member in members:
        sample = samples[member]
        whole = len(sample.prompt_ids) + len(sample.completion_ids) - 1
        cost = whole if counts_copies else row.unshared_cost(sample)
        if row.members and size + cost > max_tokens:
            rows.append(row.build())
            row, size, cost = _Builder(), 0, whole
        row.add(member, sample)
        size += cost
    if row.members:
        rows.append(row.build())
    return rows


def added_tokens(samples: Sequence[Sample], members: Iterable[int]) -> list[int]:
    """Return how many tokens each `samples[i]` adds to a row that has all members before it."""
    row, totals = _Builder(), [0]
    for member in members:
        row.add(member, samples[member])
        totals.append(row.num_tokens)
    return [after - before for before, after in pairwise(totals)]


def empty_row() -> PackedRow:
    """Return a row of one token that belongs to no sample, the least that a model can compute. It
    predicts itself, so R is 1 although `lengths` is empty."""
    zero = np.zeros(1, dtype=np.int64)
    return PackedRow(
        members=(),
        tokens_T=zero,
        positions_T=zero,
        sequences=(zero,),
        predictors_R=zero,
        targets_R=zero,
        lengths=(),
        size_unshared=1,
    )


class _Builder:
    """A row under construction."""

    def __init__(self) -> None:
        self.members: list[int] = []
        self.size_unshared = 0  # tokens of its prompts, each once, and of its responses in full
        self._tokens: list[np.ndarray] = []
        self._positions: list[np.ndarray] = []
        self.num_tokens = 0
        self._prompts: set[tuple[int, ...]] = set()
        self._known = Prefixes[np.ndarray]()  # the rows of what it has
        self._sequences: list[np.ndarray] = []
        self._samples: list[Sample] = []

    def unshared_cost(self, sample: Sample) -> int:
        """Return what the sample would add to `size_unshared`."""
        num_prompt = 0 if tuple(sample.prompt_ids) in self._prompts else len(sample.prompt_ids)
        return num_prompt + len(sample.completion_ids) - 1

    def add(self, member: int, sample: Sample) -> None:
        """Append a sample, without the prefix that the row has already."""
        self.size_unshared += self.unshared_cost(sample)
        self._prompts.add(tuple(sample.prompt_ids))
        tokens = np.array([*sample.prompt_ids, *sample.completion_ids[:-1]], dtype=np.int64)
        places, common = self._known.longest(tokens)
        shared = np.zeros(0, dtype=np.int64) if places is None else places[:common]
        num_new = len(tokens) - len(shared)
        new = np.arange(self.num_tokens, self.num_tokens + num_new)
        places = np.concatenate([shared, new])
        self._known.add(tokens, places)
        self._tokens.append(tokens[len(shared) :])
        self._positions.append(np.arange(len(shared), len(tokens)))
        self.num_tokens += num_new
        self._sequences.append(places)
        self.members.append(member)
        self._samples.append(sample)

    def build(self) -> PackedRow:
        pairs = zip(self._sequences, self._samples, strict=True)
        # A sequence lacks its last token, so its last `len(completion_ids)` places are those of the
        # tokens that predict the response's.
        predictors = [s.sampled(places[-len(s.completion_ids) :]) for places, s in pairs]
        targets = [s.sampled(s.completion_ids).astype(np.int64) for s in self._samples]
        return PackedRow(
            members=tuple(self.members),
            tokens_T=np.concatenate(self._tokens),
            positions_T=np.concatenate(self._positions),
            sequences=tuple(self._sequences),
            predictors_R=np.concatenate(predictors),
            targets_R=np.concatenate(targets),
            lengths=tuple(sample.num_sampled for sample in self._samples),
            size_unshared=self.size_unshared,
        )
