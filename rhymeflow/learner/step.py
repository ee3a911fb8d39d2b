"""One training step: a batch of trajectories in, the next version of the policy out.

The same for a learner that is one process and for each rank of one that is many: whoever holds the
weights brings the scorers of the policies and the optimizer.

Holds true: `train` consumes one batch and makes one version, whatever `num_iterations` and
`num_minibatches` are; the loss is that of the whole optimizer step however it is cut into
micro-batches, over ranks, and into groups whose gradient is computed early. Knows nothing of how
the model is held, saved or published.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
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
    clip_extremes,
    diagnose,
    diagnosis_names,
    mismatch,
    token_losses,
)
from rhymeflow.learner.logprobs import LossOf
from rhymeflow.learner.metrics import Totals, batch_metrics
from rhymeflow.learner.minibatch import MicroBatch, split, step_scales
from rhymeflow.learner.optimizer import learning_rate
from rhymeflow.learner.packing import PackedRow
from rhymeflow.learner.sample import Sample
from rhymeflow.learner.token_details import TokenDetails
from rhymeflow.utils import progress


class Scorer(Protocol):
    """Scores response tokens under a policy; `logprobs.TokenScorer` says what is returned."""

    def score(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each response token."""

    def backward(self, row: PackedRow, loss_of: LossOf) -> tuple[Tensor, Tensor]:
        """The same, and add the gradient of the row's loss to the policy's parameters."""


class StepOptimizer(Protocol):
    """Applies the gradients; `optimizer.Optimizer` says how."""

    skipped: str

    def step(self, rate: float, scale: float = 1.0) -> float:
        """Apply them times `scale` and clear them; return their norm unclipped."""

    def clear(self) -> None:
        """Forget them."""

    def reconfigure(self, config: LearnerConfig) -> None:
        """Step by another configuration from now on."""


@dataclass
class _Early:
    """Groups of a batch whose gradient is there before the batch is."""

    samples: list[Sample]
    totals: Totals
    seconds: float
    """That it took."""


class LearnerStep:
    """What a learner does with a batch. Its constructor sets the attributes below."""

    version: int
    num_tokens: int
    skipped: dict[int, str]
    """Optimizer steps of the last batch that were skipped, by number from 0, and why each was."""
    _config: LearnerConfig
    _rollout: RolloutConfig
    _device: torch.device
    _policy: Scorer
    _reference: Scorer | None
    _optimizer: StepOptimizer
    _early: _Early | None = None
    """What is known of the next batch's groups whose gradient is there."""

    def reconfigure(self, learner: LearnerConfig) -> None:
        """Train by another configuration from now on.

        Its `beta` and `gradient_checkpointing` stay what the learner was made with.
        """
        self._config = learner
        self._optimizer.reconfigure(learner)

    def accumulate(self, groups: Sequence[Sample], details: TokenDetails | None = None) -> None:
        """Add the gradient of some groups of the next batch to be trained on, all their samples.

        `details`, if given, is of these and is filled in. The configuration must allow it
        (`LearnerConfig.needs_whole_batch`).
        """
        started = time.perf_counter()
        assert not self._config.needs_whole_batch, self._config.needs_whole_batch
        early = self._so_far()
        (minibatch,) = self._split(groups, _advantages(groups, self._config).values)
        self._score_fixed_policies([minibatch])
        for micro in minibatch:
            self._accumulate(micro, early.totals, details, is_first_pass=True)
        early.samples += groups
        early.seconds += time.perf_counter() - started
        self._early = early

    def forget(self) -> None:
        """Be as if nothing had been accumulated."""
        self._early = None
        self._optimizer.clear()

    def train(
        self,
        batch: Sequence[Sample],
        step: int,
        details: TokenDetails | None = None,
        *,
        skip: Collection[int] = (),
    ) -> dict[str, float]:
        """Consume one batch as version `step`, making version `step + 1`; return the metrics.

        An optimizer step whose gradient is not finite changes nothing: see `skipped`.

        Args:
            batch: what was not accumulated of it.
            step: the version.
            details: if given, of `batch`; filled in.
            skip: optimizer steps that are not to be taken, by number.
        """
        started = time.perf_counter()
        config = self._config
        early = self._so_far()
        whole, totals, self._early = [*early.samples, *batch], early.totals, None
        advantages = _advantages(whole, config)
        minibatches = self._split(batch, advantages.values[len(early.samples) :])
        self._score_fixed_policies(minibatches)
        scales, rate = step_scales(whole, config, self._rollout), learning_rate(step, config)
        self.skipped = {}
        steps = [*zip(minibatches, scales, strict=True)] * config.num_iterations
        for number, (minibatch, scale) in enumerate(steps):
            for micro in minibatch:
                self._accumulate(micro, totals, details, is_first_pass=number < len(scales))
            if number in skip:
                self._optimizer.clear()
                continue
            totals.add_step(self._optimizer.step(rate, scale), scale)
            progress.advance()
            if self._optimizer.skipped:
                self.skipped[number] = self._optimizer.skipped
        self.version = step + 1
        self.num_tokens += sum(len(s.prompt_ids) + len(s.completion_ids) for s in whole)
        return {
            **self._whole(totals).means(),
            **batch_metrics(whole),
            "frac_reward_zero_std": advantages.frac_zero_std,
            "skipped_steps": float(len(self.skipped)),
            "learning_rate": rate,
            "num_tokens": float(self.num_tokens),
            "step_time": early.seconds + time.perf_counter() - started,
        }

    def _so_far(self) -> _Early:
        return self._early or _Early([], Totals(diagnosis_names(self._config)), 0.0)

    def _split(self, batch: Sequence[Sample], advantage_N: np.ndarray) -> list[list[MicroBatch]]:
        """The micro-batches of each optimizer step that are computed here."""
        return split(batch, advantage_N, self._config, self._device)

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
                progress.advance()

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
        progress.advance()
        if micro.is_empty:
            return
        num_tokens = len(micro.row.targets_R)
        totals.add_row(len(micro.row.tokens_T), micro.row.full)
        totals.add(diagnose(logprob_R, entropy_R, inputs, config), num_tokens)
        totals.add_clips(*clip_extremes(logprob_R, inputs, config, micro.row.lengths))
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
