"""Samples into packed rows: nothing is padded, and a prompt is computed once for its group.

Each row is one micro-batch. Its tokens are the prompts and responses of some samples one after the
other; samples with the same prompt share the prompt's tokens and each continue it, a tree of one
trunk and many branches:

    row        p p p a a b b b q q c      prompts p, q; responses a, b, c
    positions  0 1 2 3 4 3 4 5 0 1 2
    sequences  [p p p a a]  [p p p b b b]  [q q c]

The last token of a response predicts nothing and is not in the row. What an environment answered
is computed on as the rest, and not predicted. Holds true: rows depend on the
samples and their order only; each sample is in exactly one row; a row has at most `max_tokens`
tokens unless it is a single sample. Knows nothing of torch, rewards or the policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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


def empty_row() -> PackedRow:
    """A row of one token and no sample: the least that a model can compute on."""
    zero = np.zeros(1, dtype=np.int64)
    return PackedRow((), zero, zero, (zero,), zero, zero, ())


class _Builder:
    """A row under construction."""

    def __init__(self) -> None:
        self.members: list[int] = []
        self.size = 0
        self._tokens: list[list[int]] = []
        self._positions: list[np.ndarray] = []
        self._prompts: dict[tuple[int, ...], np.ndarray] = {}
        self._sequences: list[np.ndarray] = []
        self._samples: list[Sample] = []

    def cost(self, sample: Sample) -> int:
        """Tokens that the row would grow by."""
        prompt = 0 if tuple(sample.prompt_ids) in self._prompts else len(sample.prompt_ids)
        return prompt + len(sample.completion_ids) - 1

    def add(self, member: int, sample: Sample) -> None:
        """Append a sample; its prompt only if the row does not have it yet."""
        prompt = tuple(sample.prompt_ids)
        if prompt not in self._prompts:
            self._prompts[prompt] = self._append(sample.prompt_ids, 0)
        response = self._append(sample.completion_ids[:-1], len(prompt))
        self._sequences.append(np.concatenate([self._prompts[prompt], response]))
        self.members.append(member)
        self._samples.append(sample)

    def _append(self, tokens: list[int], first_position: int) -> np.ndarray:
        places = np.arange(self.size, self.size + len(tokens))
        self._tokens.append(tokens)
        self._positions.append(np.arange(first_position, first_position + len(tokens)))
        self.size += len(tokens)
        return places

    def build(self) -> PackedRow:
        """The row as arrays."""
        return PackedRow(
            members=tuple(self.members),
            tokens_T=np.concatenate([np.asarray(t, dtype=np.int64) for t in self._tokens]),
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
        )


__all__ = ["PackedRow", "empty_row", "pack"]
