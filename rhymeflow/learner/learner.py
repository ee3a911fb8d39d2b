"""The learner: a batch of trajectories in, the next version of the policy out, on 1 to N ranks.

`train` consumes one batch and makes one version, whatever `num_iterations` and `num_minibatches`
are. An optimizer step has the same loss however it is split into micro-batches, over ranks, and
into groups whose gradient is accumulated early. Each of several ranks holds its rows of the model
and computes its share of the batch; every rank reads the same batch and makes the same calls.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rhymeflow.config import LearnerConfig, RolloutConfig
from rhymeflow.learner import checkpoint, published
from rhymeflow.learner.algorithms.advantages import Advantages, batch_advantages
from rhymeflow.learner.algorithms.corrections import off_policy_weight
from rhymeflow.learner.algorithms.losses import (
    clip_extremes,
    corrects,
    diagnose,
    diagnosis_names,
    gradient,
    mismatch,
    needs_whole_responses,
    token_losses,
)
from rhymeflow.learner.logprobs import TokenScorer, recompute_layers
from rhymeflow.learner.metrics import Totals, batch_metrics
from rhymeflow.learner.minibatch import MicroBatch, lengths_in_loss, split, step_scales
from rhymeflow.learner.optimizer import Optimizer, freeze, learning_rate
from rhymeflow.learner.policy import Shards, proved_scorer
from rhymeflow.learner.ranks import ALONE, Gathering, Ranks
from rhymeflow.learner.sample import Sample
from rhymeflow.learner.token_details import TokenDetails
from rhymeflow.store.checkpoint_dirs import CheckpointDir
from rhymeflow.utils import progress
from rhymeflow.weights.manifest import Manifest
from rhymeflow.weights.publish import checksum_of


@dataclass
class _Early:
    """Groups of the next batch whose gradient is accumulated before the batch is complete."""

    samples: list[Sample]
    totals: Totals
    seconds: float
    """Time spent on them so far."""


class Learner:
    """Trains `model` by `learner`'s objective on responses sampled as `rollout` says.

    `model` attends through `models.attention`; give it in float32, so that the masters are exact.
    The learner owns it: parameters are cast to `compute_dtype` and change with every step.
    `tokenizer`, if given, is saved in checkpoints. With several `ranks` methods are collectives;
    `read`, given if `model` has no values yet, returns rows of a parameter by its name. `reference`
    is the model of the KL term, if `learner.beta` > 0; None: a copy of `model`. A response must fit
    into one rank's memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        learner: LearnerConfig,
        rollout: RolloutConfig,
        compute_dtype: torch.dtype,
        ranks: Ranks = ALONE,
        *,
        read: Callable[[str, slice], Tensor] | None = None,
        reference: PreTrainedModel | None = None,
    ) -> None:
        self.model = model
        self.version = 0
        self.num_tokens = 0
        self.charged: Counter[bool] = Counter()
        """Tokens of all micro-batches so far, by whether they had a backward pass: of a micro-batch
        each prompt once, and each response in full."""
        self.skipped: dict[int, str] = {}
        """Optimizer steps of the last batch that were skipped, by number from 0, and why."""
        self._early: _Early | None = None
        self._config, self._rollout, self._tokenizer = learner, rollout, tokenizer
        self._ranks, self._dtype = ranks, compute_dtype
        self._device = ranks.device or model.device

        def shards(model: PreTrainedModel) -> Shards | None:
            if ranks.count == 1:
                return None
            return Shards(model, ranks, compute_dtype, offload=learner.offload_optimizer, read=read)

        freeze(model, learner.frozen_parameters)
        policy_shards = shards(model)  # the optimizer must find the model sharded
        self._optimizer = Optimizer(model, learner, compute_dtype, ranks)
        self._policy = proved_scorer(model, rollout, learner, policy_shards)
        self._reference: TokenScorer | None = None
        if learner.beta > 0.0:
            reference = (reference or copy.deepcopy(model)).requires_grad_(False)
            self._reference = proved_scorer(reference, rollout, learner, shards(reference))
        if learner.gradient_checkpointing:
            recompute_layers(model)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, tied ones counted once."""
        return sum(each.numel() for each in self.model.parameters())

    def manifest(self) -> Manifest:
        """Describe the whole tensors of `rows`."""
        return published.manifest_for(self.model, self._dtype)

    def rows(self) -> Gathering:
        """Return this rank's rows of the policy's parameters, tied ones once, and its buffers, in
        compute precision: live tensors, or made as they are looked up. Use them before the next
        `train`."""
        return published.rows(self.model, self._dtype, self._ranks)

    def checksum(self) -> int:
        """Return the checksum of all weights; digests of ranks' rows add up to those of tensors."""
        return checksum_of(self.manifest(), self.rows(), self._ranks)

    def snapshot(self) -> checkpoint.LearnerCopy:
        """Copy this rank's rows of a checkpoint."""
        counts = {"version": self.version, "num_tokens": self.num_tokens}
        return checkpoint.LearnerCopy(
            self.model, self._tokenizer, self._optimizer, counts, self._dtype, self._ranks
        )

    def restore(self, saved: CheckpointDir) -> int:
        """Load a checkpoint, saved by any number of ranks; return its version. The reference model
        does not change. Raises what `checkpoint.load` does if the checkpoint cannot be read."""
        counts = checkpoint.load(saved, self._optimizer, self._ranks)
        self.version, self.num_tokens = counts["version"], counts["num_tokens"]
        return self.version

    def reconfigure(self, learner: LearnerConfig) -> None:
        """Use another configuration from now on; its `gradient_checkpointing`, and whether `beta`
        is 0, must not change."""
        self._config = learner
        self._optimizer.reconfigure(learner)

    def accumulate(self, groups: Sequence[Sample], details: TokenDetails | None = None) -> None:
        """Add the gradient of some whole groups of the next batch to be trained on.

        `details`, if given, is made of these samples and is filled in. The configuration must allow
        this (`LearnerConfig.needs_whole_batch`).
        """
        started = time.perf_counter()
        assert not self._config.needs_whole_batch, self._config.needs_whole_batch
        early, advantages = self._early_groups(), _advantages(groups, self._config)
        (minibatch,) = split(groups, advantages.values, self._config, self._device, self._ranks)
        self._score_fixed_policies([minibatch])
        self._score_responses(minibatch, is_first=True)
        for micro in minibatch:
            self._add_gradient(micro, early.totals, details, is_first_pass=True)
        early.samples += groups
        early.seconds += time.perf_counter() - started
        self._early = early

    def forget(self) -> None:
        """Discard what `accumulate` has added."""
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

        `batch` has the samples that were not accumulated, and `details`, if given, is made of them.
        Optimizer steps with numbers in `skip` are not taken; nor is one whose gradient is not
        finite.
        """
        started = time.perf_counter()
        config = self._config
        early = self._early_groups()
        samples, totals, self._early = [*early.samples, *batch], early.totals, None
        advantages = _advantages(samples, config)
        batch_advantages = advantages.values[len(early.samples) :]
        minibatches = split(batch, batch_advantages, config, self._device, self._ranks)
        self._score_fixed_policies(minibatches)
        scales, rate = step_scales(samples, config, self._rollout), learning_rate(step, config)
        self.skipped = {}
        steps = [*zip(minibatches, scales, strict=True)] * config.num_iterations
        for number, (minibatch, scale) in enumerate(steps):
            self._score_responses(minibatch, is_first=number == 0)
            for micro in minibatch:
                self._add_gradient(micro, totals, details, is_first_pass=number < len(scales))
            if number in skip:
                self._optimizer.clear()
                continue
            totals.add_step(self._optimizer.step(rate, scale), scale)
            progress.advance()
            if self._optimizer.skipped:
                self.skipped[number] = self._optimizer.skipped
        numbers = totals.as_numbers()
        totals = Totals.merged(self._ranks.gathered(numbers) or [numbers])  # all are on rank 0
        self.version = step + 1
        self.num_tokens += sum(len(s.prompt_ids) + len(s.completion_ids) for s in samples)
        return {
            **totals.means(),
            **batch_metrics(samples),
            "frac_reward_zero_std": advantages.frac_zero_std,
            "skipped_steps": float(len(self.skipped)),
            "learning_rate": rate,
            "num_tokens": float(self.num_tokens),
            "step_time": early.seconds + time.perf_counter() - started,
        }

    def _early_groups(self) -> _Early:
        return self._early or _Early([], Totals(diagnosis_names(self._config)), 0.0)

    def whole_details(self, details: TokenDetails) -> TokenDetails:
        """Return all ranks' details merged on rank 0, `details` on the others."""
        parts = self._ranks.gathered(details)
        return TokenDetails.merged(parts) if parts else details

    def _score_fixed_policies(self, minibatches: list[list[MicroBatch]]) -> None:
        """Fill in log-probabilities of the proximal policy, unless it is the policy itself, and of
        the reference, if there is one."""
        config = self._config
        is_one_step = config.num_iterations == 1 and len(minibatches) == 1
        needs_proximal = corrects(config) and not is_one_step
        needs_proximal |= config.normalize_importance_weights
        for minibatch in minibatches:
            for micro in minibatch:
                if needs_proximal:
                    proximal_R, _ = self._policy.score(micro.row)
                    micro.inputs = replace(micro.inputs, proximal_R=proximal_R)
                if self._reference is not None:
                    reference_R, _ = self._reference.score(micro.row)
                    micro.inputs = replace(micro.inputs, reference_R=reference_R)
                progress.advance()
        if config.normalize_importance_weights:
            self._normalize_weights([micro for each in minibatches for micro in each])

    def _normalize_weights(self, micros: list[MicroBatch]) -> None:
        """Tell micro-batches, whose proximal policy is known, the mean of the batch's weights."""
        total = torch.zeros(2, dtype=torch.float64)
        for micro in micros:
            if not micro.is_empty:
                assert micro.inputs.proximal_R is not None
                log_u_R = micro.inputs.proximal_R - micro.inputs.behaviour_R
                weight_R = off_policy_weight(log_u_R, self._config, micro.inputs.responses)
                total += torch.tensor([weight_R.double().sum().item(), len(weight_R)])
        weights, tokens = self._ranks.summed(total).tolist()
        for micro in micros:
            mean = weights / tokens if weights > 0.0 else 1.0
            micro.inputs = replace(micro.inputs, mean_weight=mean)

    def _score_responses(self, minibatch: list[MicroBatch], *, is_first: bool) -> None:
        """Fill in the loss's gradient by log-probabilities where a token's depends on others of its
        response; `is_first`: the weights are still those of the proximal policy."""
        if not needs_whole_responses(self._config):
            return
        for micro in minibatch:
            if micro.needs_grad:
                known_R = micro.inputs.proximal_R if is_first else None
                logprob_R = self._policy.score(micro.row)[0] if known_R is None else known_R
                micro.gradient_R = gradient(logprob_R, micro.inputs, self._config)
                progress.advance()

    def _add_gradient(
        self,
        micro: MicroBatch,
        totals: Totals,
        details: TokenDetails | None,
        *,
        is_first_pass: bool,
    ) -> None:
        """Add a micro-batch's gradient to the parameters, and its metrics to `totals`."""
        config, inputs = self._config, micro.inputs
        if not micro.is_empty:
            self.charged[micro.needs_grad] += micro.row.size_unshared + len(micro.row.members)

        def loss_of(logprob_C: Tensor, chunk: slice) -> Tensor:
            if micro.gradient_R is not None:
                return (micro.gradient_R[chunk] * logprob_C).sum()
            chunk_inputs = inputs[chunk]
            return (token_losses(logprob_C, chunk_inputs, config) * chunk_inputs.weight_R).sum()

        if micro.needs_grad:
            logprob_R, entropy_R = self._policy.backward(micro.row, loss_of)
        else:
            logprob_R, entropy_R = self._policy.score(micro.row)
        progress.advance()
        if micro.is_empty:
            return
        sums = diagnose(logprob_R, entropy_R, inputs, config)
        sums |= clip_extremes(logprob_R, inputs, config, micro.row.lengths)
        if is_first_pass:
            current_R = logprob_R if inputs.proximal_R is None else inputs.proximal_R
            kl, max_ratio = mismatch(current_R, inputs.behaviour_R)
            sums |= {"off_policy/mismatch_kl": kl, "off_policy/max_ratio": max_ratio}
            if details is not None:
                details.add_logprobs(micro.row, current_R)
        totals.add(sums, micro.row, is_first_pass=is_first_pass)
        if details is not None:
            details.add_flags(micro, logprob_R)


def _advantages(batch: Sequence[Sample], config: LearnerConfig) -> Advantages:
    rewards, groups = [each.reward for each in batch], [each.group for each in batch]
    components, lengths = [each.components for each in batch], lengths_in_loss(batch, config)
    return batch_advantages(rewards, groups, lengths, config, components, batch[0].weights)
