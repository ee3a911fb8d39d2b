"""One training step: a batch of trajectories in, the next version of the policy out.

The same for a learner that is one process and for each rank of one that is many: whoever holds the
weights brings the scorers of the policies and the optimizer.

Holds true: `train` consumes one batch and makes one version, whatever `num_iterations` and
`num_minibatches` are; the loss is that of the whole optimizer step however it is cut into
micro-batches, and over ranks. Knows nothing of how the model is held, saved or published.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rhymeflow.config import LearnerConfig, RolloutConfig
from rhymeflow.learner.algorithms.advantages import (
    Advantages,
    decoupled_advantages,
    group_advantages,
)
from rhymeflow.learner.algorithms.losses import (
    diagnose,
    diagnosis_names,
    mismatch,
    token_losses,
)
from rhymeflow.learner.logprobs import LossOf
from rhymeflow.learner.metrics import Totals, batch_metrics
from rhymeflow.learner.minibatch import MicroBatch, split
from rhymeflow.learner.optimizer import learning_rate
from rhymeflow.learner.packing import PackedRow
from rhymeflow.learner.sample import Sample
from rhymeflow.learner.token_details import TokenDetails


class Scorer(Protocol):
    """Scores response tokens under a policy; `logprobs.TokenScorer` says what is returned."""

    def score(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each response token."""

    def backward(self, row: PackedRow, loss_of: LossOf) -> tuple[Tensor, Tensor]:
        """The same, and add the gradient of the row's loss to the policy's parameters."""


class StepOptimizer(Protocol):
    """Applies the gradients; `optimizer.Optimizer` says how."""

    def step(self, rate: float) -> float:
        """Apply them and clear them; return their norm unclipped."""

    def reconfigure(self, config: LearnerConfig) -> None:
        """Step by another configuration from now on."""


class LearnerStep:
    """What a learner does with a batch. Its constructor sets the attributes below."""

    version: int
    num_tokens: int
    _config: LearnerConfig
    _rollout: RolloutConfig
    _device: torch.device
    _policy: Scorer
    _reference: Scorer | None
    _optimizer: StepOptimizer

    def reconfigure(self, learner: LearnerConfig) -> None:
        """Train by another configuration from now on.

        Its `beta` and `gradient_checkpointing` stay what the learner was made with.
        """
        self._config = learner
        self._optimizer.reconfigure(learner)

    def train(
        self, batch: Sequence[Sample], step: int, details: TokenDetails | None = None
    ) -> dict[str, float]:
        """Consume one batch as version `step`, making version `step + 1`; return the metrics.

        `details`, if given, is of this batch and is filled in.

        Raises `UserError` if a gradient is not finite; the version's weights are kept then.
        """
        started = time.perf_counter()
        config = self._config
        advantages = _advantages(batch, config)
        minibatches = self._split(batch, advantages.values)
        totals = Totals(diagnosis_names(config))
        self._score_fixed_policies(minibatches)
        rate = learning_rate(step, config)
        for iteration in range(config.num_iterations):
            for minibatch in minibatches:
                for micro in minibatch:
                    self._accumulate(micro, totals, details, is_first_pass=iteration == 0)
                totals.add_step(self._optimizer.step(rate))
        self.version = step + 1
        self.num_tokens += sum(len(s.prompt_ids) + len(s.completion_ids) for s in batch)
        return {
            **self._whole(totals).means(),
            **batch_metrics(batch),
            "frac_reward_zero_std": advantages.frac_zero_std,
            "learning_rate": rate,
            "num_tokens": float(self.num_tokens),
            "step_time": time.perf_counter() - started,
        }

    def _split(self, batch: Sequence[Sample], advantage_N: np.ndarray) -> list[list[MicroBatch]]:
        """The micro-batches of each optimizer step that are computed here."""
        return split(batch, advantage_N, self._config, self._rollout, self._device)

    def _whole(self, totals: Totals) -> Totals:
        """The totals of the whole batch, given those of what was computed here."""
        return totals

    def _score_fixed_policies(self, minibatches: list[list[MicroBatch]]) -> None:
        """Log-probabilities of the proximal policy, where it is not the policy itself, and of the
        reference, where there is one.
        """
        config = self._config
        is_one_step = config.num_iterations == 1 and len(minibatches) == 1
        needs_proximal = config.off_policy_correction != "none" and not is_one_step
        for minibatch in minibatches:
            for micro in minibatch:
                if needs_proximal:
                    proximal_R, _ = self._policy.score(micro.row)
                    micro.inputs = micro.inputs.with_(proximal_R=proximal_R)
                if self._reference is not None:
                    reference_R, _ = self._reference.score(micro.row)
                    micro.inputs = micro.inputs.with_(reference_R=reference_R)

    def _accumulate(
        self,
        micro: MicroBatch,
        totals: Totals,
        details: TokenDetails | None,
        *,
        is_first_pass: bool,
    ) -> None:
        """Add one micro-batch's gradient to the step's, and its numbers to the totals."""
        config, inputs = self._config, micro.inputs

        def loss_of(logprob_C: Tensor, chunk: slice) -> Tensor:
            some = inputs[chunk]
            return (token_losses(logprob_C, some, config) * some.weight_R).sum()

        if micro.needs_grad:
            logprob_R, entropy_R = self._policy.backward(micro.row, loss_of)
        else:
            logprob_R, entropy_R = self._policy.score(micro.row)
        if micro.is_empty:
            return
        num_tokens = len(micro.row.targets_R)
        totals.add(diagnose(logprob_R, entropy_R, inputs, config), num_tokens)
        if is_first_pass:
            current_R = logprob_R if inputs.proximal_R is None else inputs.proximal_R
            totals.add_mismatch(*mismatch(current_R, inputs.behaviour_R), num_tokens)
            if details is not None:
                details.add_logprobs(micro.row, current_R)
        if details is not None:
            details.add_flags(micro, logprob_R)


def _advantages(batch: Sequence[Sample], config: LearnerConfig) -> Advantages:
    groups = [sample.group for sample in batch]
    if config.multi_objective_aggregation == "normalize_then_sum":
        return decoupled_advantages([s.components for s in batch], batch[0].weights, groups)
    return group_advantages([sample.reward for sample in batch], groups, config.scale_rewards)


__all__ = ["LearnerStep", "Scorer", "StepOptimizer"]
