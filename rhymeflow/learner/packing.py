"""Samples into packed rows: nothing is padded, and what samples begin with is computed once.

Each row is one micro-batch. Its tokens are the prompts and responses of some samples one after the
other; samples with the same prompt share the prompt's tokens and those of their responses up to
where they differ, a tree:

    row        p p p x a a b b q q c      prompts p, q; responses x a a, x b b, c
    positions  0 1 2 3 4 5 4 5 0 1 2
    sequences  [p p p x a a]  [p p p x b b]  [q q c]

A shared token is one of each of its samples, and its gradient is the sum of theirs. The surer a
policy is, the more its responses have in common.

The last token of a response predicts nothing and is not in the row. What an environment answered
is computed on as the rest, and not predicted. Holds true: rows depend on the
samples and their order only; each sample is in exactly one row; a row has at most `max_tokens`
tokens, every response counted in full, unless it is a single sample: so it predicts no more of them
either. Knows nothing of torch, rewards or the policy.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rhymeflow.learner.sample import Sample


@dataclass(frozen=True)
class PackedRow:
    """One micro-batch. T tokens in the row, R sampled response tokens predicted by them."""

    members: tuple[int, ...]
    """Index of each sequence's sample in the list that was packed."""
    tokens_T: np.ndarray
    """Token ids, int64."""
    positions_T: np.ndarray
    """Position of each token in its own sequence, int64."""
    sequences: tuple[np.ndarray, ...]
    """For each member, where its tokens lie in the row, in order, int64."""
    predictors_R: np.ndarray
    """Where in the row each sampled token is predicted, int64; grouped by member, in order."""
    targets_R: np.ndarray
    """The sampled tokens, int64."""
    lengths: tuple[int, ...]
    """Sampled tokens of each member; their sum is R."""
    full: int
    """T, were all responses computed in full."""


def pack(samples: Sequence[Sample], members: Iterable[int], max_tokens: int) -> list[PackedRow]:
    """Pack `samples[i]` for `i` in `members`, in that order, into rows of at most `max_tokens`.

    A row is closed by the first sample that does not fit; a sample that is longer than `max_tokens`
    gets a row of its own.
    """
    rows = []
    row = _Builder()
    for member in members:
        sample = samples[member]
        if row.members and row.size + row.cost(sample) > max_tokens:
            rows.append(row.build())
            row = _Builder()
        row.add(member, sample)
    if row.members:
        rows.append(row.build())
    return rows


def added(samples: Sequence[Sample], members: Iterable[int]) -> list[int]:
    """Tokens that each of `samples[i]` would add to a row that has those before it."""
    row, sizes = _Builder(), [0]
    for member in members:
        row.add(member, samples[member])
        sizes.append(row.num_tokens)
    return [after - before for before, after in pairwise(sizes)]


def empty_row() -> PackedRow:
    """A row of one token and no sample: the least that a model can compute on."""
    zero = np.zeros(1, dtype=np.int64)
    return PackedRow((), zero, zero, (zero,), zero, zero, (), 1)


class _Builder:
    """A row under construction."""

    def __init__(self) -> None:
        self.members: list[int] = []
        self.size = 0
        """Tokens of its prompts and of its responses, in full."""
        self._tokens: list[np.ndarray] = []
        self._positions: list[np.ndarray] = []
        self.num_tokens = 0
        self._known: dict[tuple[int, ...], _Known] = {}
        """By prompt."""
        self._sequences: list[np.ndarray] = []
        self._samples: list[Sample] = []

    def cost(self, sample: Sample) -> int:
        """What `size` would grow by."""
        prompt = 0 if tuple(sample.prompt_ids) in self._known else len(sample.prompt_ids)
        return prompt + len(sample.completion_ids) - 1

    def add(self, member: int, sample: Sample) -> None:
        """Append a sample, without what the row has of it already."""
        self.size += self.cost(sample)
        known = self._known.setdefault(tuple(sample.prompt_ids), _Known())
        tokens = np.array([*sample.prompt_ids, *sample.completion_ids[:-1]], dtype=np.int64)
        shared = known.longest_beginning(tokens)
        places = np.concatenate([shared, self._append(tokens[len(shared) :], len(shared))])
        known.add(tokens, places)
        self._sequences.append(places)
        self.members.append(member)
        self._samples.append(sample)

    def _append(self, tokens: np.ndarray, first_position: int) -> np.ndarray:
        places = np.arange(self.num_tokens, self.num_tokens + len(tokens))
        self._tokens.append(tokens)
        self._positions.append(np.arange(first_position, first_position + len(tokens)))
        self.num_tokens += len(tokens)
        return places

    def build(self) -> PackedRow:
        """The row as arrays."""
        return PackedRow(
            members=tuple(self.members),
            tokens_T=np.concatenate(self._tokens),
            positions_T=np.concatenate(self._positions),
            sequences=tuple(self._sequences),
            predictors_R=np.concatenate(
                [
                    sample.sampled(places[-len(sample.completion_ids) :])
                    for places, sample in zip(self._sequences, self._samples, strict=True)
                ]
            ),
            targets_R=np.concatenate(
                [s.sampled(s.completion_ids).astype(np.int64) for s in self._samples]
            ),
            lengths=tuple(sample.num_sampled for sample in self._samples),
            full=self.size,
        )


class _Known:
    """Samples of one prompt, and where in the row their tokens lie.

    They are sorted by their tokens' bytes: of a sorted list, what has most of its beginning in
    common with something new stands next to the new one's place, so two are looked at however many
    there are. Which of several is taken makes no difference: they share those tokens.
    """

    def __init__(self) -> None:
        self._sorted: list[bytes] = []
        self._places: list[np.ndarray] = []

    def add(self, tokens: np.ndarray, places: np.ndarray) -> None:
        """These tokens lie there."""
        key = tokens.tobytes()
        index = bisect(self._sorted, key)
        self._sorted.insert(index, key)
        self._places.insert(index, places)

    def longest_beginning(self, tokens: np.ndarray) -> np.ndarray:
        """Where the most of the first `tokens` lie that a sample begins with too."""
        index = bisect(self._sorted, tokens.tobytes())
        longest = np.zeros(0, dtype=np.int64)
        for neighbour in range(max(index - 1, 0), min(index + 1, len(self._sorted))):
            others = np.frombuffer(self._sorted[neighbour], dtype=tokens.dtype)
            length = min(len(tokens), len(others))
            differ = np.flatnonzero(tokens[:length] != others[:length])
            common = int(differ[0]) if len(differ) else length
            if common > len(longest):
                longest = self._places[neighbour][:common]
        return longest


__all__ = ["PackedRow", "added", "empty_row", "pack"]
