"""The learner's log-probability of each token of a batch, and what became of it in the loss.

Log-probabilities are under the learner's policy, float32 (with `tis` and `decoupled`, pi_prox; with
`none`, when the token was first trained on). Each token has a byte of flags, the sum of

    1  clipped  in some optimizer step the ratio was past the clip, and carried no gradient
    2  capped   u was past a bound (`tis` caps it there, `decoupled` drops the token)
    4  masked   the token is not in the loss: it is observed, or the whole response is left out
                (`learner.mask_truncated_completions`)

A response that is left out has flags but no log-probabilities; those of observed tokens are NaN."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from rhymeflow.config import LearnerConfig
from rhymeflow.learner.algorithms.losses import capped, clipped
from rhymeflow.learner.minibatch import MicroBatch
from rhymeflow.learner.packing import PackedRow
from rhymeflow.learner.sample import Sample

CLIPPED, CAPPED, MASKED = 1, 2, 4


class TokenDetails:
    """Collects the details of `batch` while `Learner.train` runs on it."""

    def __init__(self, batch: Sequence[Sample], config: LearnerConfig) -> None:
        self._config = config
        self._logprobs: list[np.ndarray | None] = [None] * len(batch)
        self._flags = [np.full(len(s.completion_ids), MASKED, np.uint8) for s in batch]
        self._sampled = [~np.array(s.observed or [False] * len(s.completion_ids)) for s in batch]

    def add_logprobs(self, row: PackedRow, logprob_R: Tensor) -> None:
        """Record the log-probabilities of a row's sampled tokens, and that they are in the loss."""
        for member, logprobs in _by_member(row, logprob_R.detach().float().cpu().numpy()):
            sampled = self._sampled[member]
            whole = self._logprobs[member] = np.full(len(sampled), np.nan, np.float32)
            whole[sampled] = logprobs
            self._flags[member][sampled] &= ~np.uint8(MASKED)

    def add_flags(self, micro: MicroBatch, logprob_R: Tensor) -> None:
        """Record which tokens an optimizer step clips or caps, given their log-probabilities."""
        logprob_R = logprob_R.detach()
        is_low_R, is_high_R = clipped(logprob_R, micro.inputs, self._config)
        is_capped_R = capped(logprob_R, micro.inputs, self._config)
        flags_R = CLIPPED * (is_low_R | is_high_R).byte() + CAPPED * is_capped_R.byte()
        for member, flags in _by_member(micro.row, flags_R.cpu().numpy()):
            self._flags[member][self._sampled[member]] |= flags

    @classmethod
    def merged(cls, parts: Sequence[TokenDetails]) -> TokenDetails:
        """Merge the details that several ranks collected of one batch."""
        merged = parts[0]
        for part in parts[1:]:
            for member, logprobs in enumerate(part._logprobs):
                if logprobs is not None:
                    merged._logprobs[member] = logprobs
                    merged._flags[member] = part._flags[member]
        return merged

    def blobs(self) -> Iterator[tuple[bytes | None, bytes]]:
        """Yield each sample's log-probabilities (float32, little-endian; None: none) and flags."""
        for logprobs, flags in zip(self._logprobs, self._flags, strict=True):
            yield None if logprobs is None else logprobs.astype("<f4").tobytes(), flags.tobytes()


def _by_member(row: PackedRow, values_R: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    ends = np.cumsum(row.lengths)
    return zip(row.members, np.split(values_R, ends[:-1]), strict=True)
