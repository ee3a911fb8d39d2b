"""What has to be known of a batch before its gradients: scores of policies that do not change.

They are those of the policy before the batch's first step and of the reference; what follows from
them for whole responses and for the whole batch is the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rhymeflow.config import LearnerConfig
from rhymeflow.learner.algorithms.corrections import off_policy_weight
from rhymeflow.learner.algorithms.losses import KL, gradient
from rhymeflow.learner.algorithms.surrogates import bounded
from rhymeflow.learner.logprobs import TokenScorer
from rhymeflow.learner.minibatch import MicroBatch, lengths_in_loss, pack_for_rank
from rhymeflow.learner.packing import PackedRow
from rhymeflow.learner.ranks import Ranks
from rhymeflow.learner.sample import Sample
from rhymeflow.learner.teacher import ModelTeacher, ServedTeacher
from rhymeflow.utils import progress


@dataclass(frozen=True)
class Scoring:
    """Scores micro-batches. With several ranks methods are collectives."""

    policy: TokenScorer
    reference: TokenScorer | None
    ranks: Ranks
    teacher: ModelTeacher | ServedTeacher | None = None

    def fixed_policies(self, minibatches: list[list[MicroBatch]], config: LearnerConfig) -> None:
        """Fill in log-probabilities of the proximal policy, unless it is the policy itself, of the
        reference and of the teacher, if there are any; and what is of the whole batch."""
        micros, entropies = [micro for minibatch in minibatches for micro in minibatch], []
        for micro in micros:
            if config.needs_proximal:
                proximal_R, entropy_R = self.policy.score(micro.row)
                entropies.append(entropy_R)
                micro.inputs = replace(micro.inputs, proximal_R=proximal_R)
            if self.reference is not None and config.kl_weight > 0.0:
                reference_R, _ = self.reference.score(micro.row)
                micro.inputs = replace(micro.inputs, reference_R=reference_R)
            progress.advance()
        if self.teacher is not None and not config.distillation.is_divergence:
            scores = self.teacher.scores([micro.for_teacher for micro in micros])
            for micro, teacher_R in zip(micros, scores, strict=True):
                micro.inputs = replace(micro.inputs, teacher_R=teacher_R)
        if config.normalize_importance_weights:
            self._normalize_weights(micros, config)
        if config.top_entropy_quantile < 1.0:
            self._choose_tokens(micros, entropies, config.top_entropy_quantile)

    def responses(
        self, minibatch: list[MicroBatch], config: LearnerConfig, *, is_first: bool
    ) -> None:
        """Fill in the loss's gradient by log-probabilities where a token's depends on others of its
        response; `is_first`: the weights are still those of the proximal policy."""
        if not config.needs_whole_responses:
            return
        for micro in minibatch:
            if micro.needs_grad:
                known_R = micro.inputs.proximal_R if is_first else None
                logprob_R = self.policy.score(micro.row)[0] if known_R is None else known_R
                micro.gradient_R = gradient(logprob_R, micro.inputs, config)
                progress.advance()

    def kl(self, batch: Sequence[Sample], config: LearnerConfig) -> list[np.ndarray]:
        """Return the KL from the reference of each sample's tokens in the loss, float64 [R]."""

        def score(row: PackedRow) -> Tensor:
            assert self.reference is not None
            policy_R, reference_R = (each.score(row)[0] for each in (self.policy, self.reference))
            return KL[config.kl_estimator][0](bounded(reference_R - policy_R))

        return self.per_token(batch, config, score)

    def per_token(
        self, batch: Sequence[Sample], config: LearnerConfig, score: Callable[[PackedRow], Tensor]
    ) -> list[np.ndarray]:
        """Return what `score` says of each sample's tokens in the loss, on all ranks: float64 [R],
        none of a sample that is left out."""
        lengths, ranks = lengths_in_loss(batch, config), self.ranks
        score_T = torch.zeros(sum(lengths), dtype=torch.float64)
        parts = score_T.split(lengths)
        members = [i for i, length in enumerate(lengths) if length]
        most = config.max_tokens_per_microbatch
        for row in pack_for_rank(batch, members, most, ranks.rank, ranks.count):
            score_R = score(row).double().cpu()
            if row.members:
                for member, scores in zip(row.members, score_R.split(row.lengths), strict=True):
                    parts[member].copy_(scores)
            progress.advance()
        return [*np.split(ranks.summed(score_T).numpy(), np.cumsum(lengths)[:-1])]

    def _normalize_weights(self, micros: list[MicroBatch], config: LearnerConfig) -> None:
        """Tell micro-batches, whose proximal policy is known, the mean of the batch's weights."""
        total = torch.zeros(2, dtype=torch.float64)
        for micro in micros:
            if not micro.is_empty:
                assert micro.inputs.proximal_R is not None
                log_u_R = micro.inputs.proximal_R - micro.inputs.behaviour_R
                weight_R = off_policy_weight(log_u_R, config, micro.inputs.responses)
                total += torch.tensor([weight_R.double().sum().item(), len(weight_R)])
        weights, tokens = self.ranks.summed(total).tolist()
        for micro in micros:
            mean = weights / tokens if weights > 0.0 else 1.0
            micro.inputs = replace(micro.inputs, mean_weight=mean)

    def _choose_tokens(
        self, micros: list[MicroBatch], entropies: list[Tensor], share: float
    ) -> None:
        """Leave all but the batch's tokens of highest entropy out of the surrogate."""
        own = [x.cpu() for m, x in zip(micros, entropies, strict=True) if not m.is_empty]
        own_R, rank = torch.cat(own) if own else torch.zeros(0), self.ranks.rank
        count_K = torch.zeros(self.ranks.count, dtype=torch.int64)
        count_K[rank] = len(own_R)
        end_K = self.ranks.summed(count_K).cumsum(0)
        all_T, end = torch.zeros(int(end_K[-1])), int(end_K[rank])
        all_T[end - len(own_R) : end] = own_R
        whole = self.ranks.summed(all_T).double().numpy()
        least = float(np.quantile(whole, 1.0 - share)) if len(whole) else 0.0
        for micro, entropy_R in zip(micros, entropies, strict=True):
            micro.inputs = replace(micro.inputs, chosen_R=(entropy_R >= least).float())
