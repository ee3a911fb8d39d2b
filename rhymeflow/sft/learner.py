"""The learner, with the log-probability of given tokens for an objective.

The loss is the mean over a batch's learnt tokens, however the batch is cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rhymeflow.learner.learner import Learner
from rhymeflow.learner.optimizer import learning_rate
from rhymeflow.learner.packing import PackedRow, pack
from rhymeflow.learner.sample import Sample


class SupervisedLearner(Learner):
    """Trains on samples as the right ones; what is observed in them is read and not learnt.

    Their rewards, log-probabilities and versions mean nothing here.
    """

    def fit(self, batch: Sequence[Sample], step: int) -> dict[str, float]:
        """Take optimizer step `step`, from 0, on a batch; return the metrics.

        A gradient that is not finite changes nothing: see `skipped`.
        """
        num_learnt = _num_learnt(batch)

        def loss_of(logprob_C: Tensor, chunk: slice) -> Tensor:
            return -logprob_C.sum() / num_learnt

        logprob = sum(float(self._policy.backward(r, loss_of)[0].sum()) for r in self._pack(batch))
        rate = learning_rate(step, self._config)
        norm = self._optimizer.step(rate)
        self.skipped = {0: self._optimizer.skipped} if self._optimizer.skipped else {}
        self.version = step + 1
        self.num_tokens += sum(len(s.prompt_ids) + len(s.completion_ids) for s in batch)
        return {
            "loss": -logprob / num_learnt,
            "grad_norm": norm,
            "learning_rate": rate,
            "num_tokens": float(self.num_tokens),
        }

    def loss(self, samples: Sequence[Sample]) -> float:
        """The mean over learnt tokens, without learning."""
        logprob = sum(float(self._policy.score(row)[0].sum()) for row in self._pack(samples))
        return -logprob / _num_learnt(samples)

    def _pack(self, samples: Sequence[Sample]) -> list[PackedRow]:
        return pack(samples, range(len(samples)), self._config.max_tokens_per_microbatch)


def _num_learnt(samples: Sequence[Sample]) -> int:
    return sum(sample.num_sampled for sample in samples)
