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
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rhymeflow.config import LearnerConfig, RolloutConfig
from rhymeflow.core.spread import is_flat
from rhymeflow.learner import checkpoint, published
from rhymeflow.learner.algorithms.advantages import Advantages, batch_advantages, shaped_rewards
from rhymeflow.learner.algorithms.divergences import divergence
from rhymeflow.learner.algorithms.gae import estimates, token_rewards
from rhymeflow.learner.algorithms.losses import (
    DIVERGENCE,
    clip_extremes,
    diagnose,
    diagnosis_names,
    mismatch,
    token_losses,
)
from rhymeflow.learner.critic import Critic
from rhymeflow.learner.logprobs import Logits, LossOf, TokenScorer, recompute_layers
from rhymeflow.learner.metrics import Totals, batch_metrics
from rhymeflow.learner.minibatch import (
    MicroBatch,
    lengths_in_loss,
    response_lengths,
    split,
    step_scales,
)
from rhymeflow.learner.optimizer import Optimizer, freeze, learning_rate
from rhymeflow.learner.policy import Shards, proved_scorer
from rhymeflow.learner.ranks import ALONE, Gathering, Ranks
from rhymeflow.learner.sample import Sample, by_response, first_sequences, owners
from rhymeflow.learner.scoring import Scoring
from rhymeflow.learner.teacher import ModelTeacher, ServedTeacher
from rhymeflow.learner.token_details import TokenDetails
from rhymeflow.models.families import carries_state
from rhymeflow.models.frozen_base import FrozenBase
from rhymeflow.models.lora import adapter_in, call_at_start, keep_start
from rhymeflow.store.checkpoint_dirs import CheckpointDir
from rhymeflow.utils import progress
from rhymeflow.weights.manifest import Manifest
from rhymeflow.weights.publish import checksum_of, row_digests

Reads = Callable[[str, slice], Tensor]
"""Returns rows of a parameter by its name."""


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
    is the model of the KL term, if `learner.beta` > 0, and the teacher `start`; None: a copy of
    `model`, or if that has an adapter, which alone is then trained, of the adapter's values, if
    they are from files, and `model` without it, if it is new. `critic` is
    what the critic is made of, if there is one; None: a copy of `model`. `teacher` is the model of
    `learner.distillation`, if ranks load one, with its `read_teacher`. A response must fit into one
    rank's memory.
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
        read: Reads | None = None,
        reference: PreTrainedModel | None = None,
        critic: PreTrainedModel | None = None,
        teacher: PreTrainedModel | None = None,
        read_teacher: Reads | None = None,
    ) -> None:
        self.model = model
        self.version = 0
        self.num_tokens = 0
        self.charged: Counter[str] = Counter()
        """As in `TokenScorer`, of all models; `emulation.learner_cost` says the same of a batch."""
        self.skipped: dict[int, str] = {}
        """Optimizer steps of the last batch that were skipped, by number from 0, and why."""
        self.copied: torch.cuda.Event | None = None  # before which weights must not change
        self._early: _Early | None = None
        self._config, self._rollout, self._tokenizer = learner, rollout, tokenizer
        self._ranks, self._dtype = ranks, compute_dtype
        self._counts_copies = carries_state(model.config.to_dict())
        self._device = ranks.device or model.device

        def shards(model: PreTrainedModel, read: Reads | None = read) -> Shards | None:
            if ranks.count == 1:
                return None
            return Shards(model, ranks, compute_dtype, offload=learner.offload_optimizer, read=read)

        def frozen(model: PreTrainedModel, read: Reads | None = read) -> TokenScorer:
            model.requires_grad_(False)
            return counted(model, shards(model, read))

        def counted(model: PreTrainedModel, shards: Shards | None) -> TokenScorer:
            found = proved_scorer(model, rollout, learner, shards)
            return replace(found, charged=self.charged)

        self._critic: Critic | None = None
        if learner.has_critic:  # copied while the weights are exact
            given = critic or copy.deepcopy(model)
            how = compute_dtype, ranks, read, self.charged
            self._critic = Critic(given, learner, rollout, *how)
        freeze(model, learner.frozen_parameters)
        if learner.needs_start:
            keep_start(model, compute_dtype, self._device)
        policy_shards = shards(model)  # the optimizer must find the model sharded
        self._optimizer = Optimizer(model, learner, compute_dtype, ranks)
        self._policy = counted(model, policy_shards)
        self._base = None if adapter_in(model) is None else FrozenBase(model, ranks)
        self._reference: TokenScorer | None = None
        if learner.needs_start and self._base is not None:
            start = partial(call_at_start, model, self._policy.forward)
            self._reference = replace(self._policy, forward=start)
        elif learner.needs_start:
            self._reference = frozen(reference or copy.deepcopy(model))
        loaded = None if teacher is None else frozen(teacher, read_teacher)
        self._teacher = self._teacher_of(loaded)
        self._scoring = Scoring(self._policy, self._reference, ranks, self._teacher)
        if learner.gradient_checkpointing:
            recompute_layers(model)

    def _teacher_of(self, loaded: TokenScorer | None) -> ModelTeacher | ServedTeacher | None:
        """Return the teacher of `learner.distillation`, which is `loaded` if ranks have one."""
        config = self._config.distillation
        if config.is_served:
            return ServedTeacher(config, self._device)
        is_policy = config.teacher == "policy"
        own = {"policy": self._policy, "start": self._reference}
        if (chosen := own.get(config.teacher or "", loaded)) is None:
            return None
        return ModelTeacher(chosen, is_policy=is_policy, is_sharded=self._ranks.count > 1)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, tied ones counted once."""
        return sum(each.numel() for each in self.model.parameters())

    @property
    def num_of_critic(self) -> int:
        """Parameters of the critic; 0: there is none."""
        return 0 if self._critic is None else self._critic.num_parameters

    @property
    def _optimizers(self) -> dict[str, Optimizer]:
        """All optimizers, by what a checkpoint's names of their state begin with."""
        critic = {} if self._critic is None else {"critic.": self._critic.optimizer}
        return {"": self._optimizer, **critic}

    def manifest(self) -> Manifest:
        """Describe the whole tensors of `rows`."""
        return published.manifest_for(self.model, self._dtype, self._base)

    def rows(self) -> Gathering:
        """Return this rank's rows of the policy's parameters, tied ones once, and its buffers, in
        compute precision: live tensors, or made as they are looked up. Use them before the next
        `train`, or set `copied`."""
        if self._base is not None:
            self._base.check_part()
        return published.rows(self.model, self._dtype, self._ranks, self._base)

    def checksum(self) -> int:
        """Return the checksum of all weights; digests of ranks' rows add up to those of tensors."""
        manifest, ranks = self.manifest(), self._ranks
        return checksum_of(manifest, row_digests(manifest, self.rows(), ranks), ranks)

    def snapshot(self) -> checkpoint.LearnerCopy:
        """Copy this rank's rows of a checkpoint."""
        counts = {"version": self.version, "num_tokens": self.num_tokens}
        return checkpoint.LearnerCopy(
            self.model, self._tokenizer, self._optimizers, counts, self._dtype, self._ranks
        )

    def restore(self, saved: CheckpointDir) -> int:
        """Load a checkpoint, saved by any number of ranks; return its version. The reference model
        does not change. Raises what `checkpoint.load` does if the checkpoint cannot be read."""
        counts = checkpoint.load(saved, self._optimizers, self._ranks)
        self.version, self.num_tokens = counts["version"], counts["num_tokens"]
        return self.version

    def reconfigure(self, learner: LearnerConfig) -> None:
        """Use another configuration from now on; its `gradient_checkpointing`, whether `beta` is 0
        and whether there is a critic must not change."""
        self._config = learner
        for each in self._optimizers.values():
            each.reconfigure(learner)

    def accumulate(self, groups: Sequence[Sample], details: TokenDetails | None = None) -> None:
        """Add the gradient of some whole groups of the next batch to be trained on.

        `details`, if given, is made of these samples and is filled in. The configuration must allow
        this (`LearnerConfig.needs_whole_batch`).
        """
        started = time.perf_counter()
        assert not self._config.needs_whole_batch, self._config.needs_whole_batch
        early, advantages = self._early_groups(), self._advantages(groups)
        (minibatch,) = self._split(groups, advantages.values)
        self._scoring.fixed_policies([minibatch], self._config)
        self._scoring.responses(minibatch, self._config, is_first=True)
        for micro in minibatch:
            self._add_gradient(micro, early.totals, details, is_first_pass=True)
        early.samples += groups
        early.seconds += time.perf_counter() - started
        self._early = early

    def forget(self) -> None:
        """Discard what `accumulate` has added."""
        self._early = None
        self._clear()

    def _clear(self) -> None:
        for each in self._optimizers.values():
            each.clear()

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
        advantages = self._advantages(samples)
        batch_advantages = advantages.of_tokens or advantages.values[len(early.samples) :]
        minibatches = self._split(batch, batch_advantages)
        self._scoring.fixed_policies(minibatches, config)
        scales, rate = step_scales(samples, config, self._rollout), learning_rate(step, config)
        if config.has_critic and step < config.critic_warmup_steps:
            for micro in chain.from_iterable(minibatches):
                micro.needs_grad = False
        self.skipped = {}
        steps = [*zip(minibatches, scales, strict=True)] * config.num_iterations
        for number, (minibatch, scale) in enumerate(steps):
            self._scoring.responses(minibatch, config, is_first=number == 0)
            for micro in minibatch:
                self._add_gradient(micro, totals, details, is_first_pass=number < len(scales))
            if number in skip:
                self._clear()
                continue
            norm, problem = self._step(step, rate, scale)
            totals.add_step(norm, scale)
            progress.advance()
            if problem:
                self.skipped[number] = problem
        numbers = totals.as_numbers()
        totals = Totals.merged(self._ranks.gathered(numbers) or [numbers])  # all are on rank 0
        self.version = step + 1
        self.num_tokens += sum(len(s.prompt_ids) + len(s.completion_ids) for s in samples)
        of_batch = batch_metrics(samples)
        if advantages.kl is not None:
            of_batch["kl"] = advantages.kl
        if "reward" in of_batch:
            of_batch["frac_reward_zero_std"] = advantages.frac_zero_std
        return {
            **totals.means(),
            **(self._critic.metrics() if self._critic is not None else {}),
            **of_batch,
            "skipped_steps": float(len(self.skipped)),
            "learning_rate": rate,
            "num_tokens": float(self.num_tokens),
            "step_time": early.seconds + time.perf_counter() - started,
        }

    def _step(self, step: int, rate: float, scale: float) -> tuple[float, str]:
        """Take an optimizer step of policy and critic, or of neither; return the norm of the
        policy's gradient, and why none was taken."""
        critic, config = self._critic, self._config
        if self.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self.copied)  # the GPU, not the host
        if critic is None:
            return self._optimizer.step(rate, scale), self._optimizer.skipped
        norm, problem = 0.0, critic.measure(scale)
        if not problem and step >= config.critic_warmup_steps:
            norm = self._optimizer.step(rate, scale)
            problem = self._optimizer.skipped
        if not problem:
            critic.step(step, config)
        self._clear()
        return norm, problem

    def _split(
        self, batch: Sequence[Sample], advantages: np.ndarray | list[np.ndarray]
    ) -> list[list[MicroBatch]]:
        settings, place = (self._config, self._rollout), (self._device, self._ranks)
        return split(batch, advantages, *settings, *place, counts_copies=self._counts_copies)

    def _early_groups(self) -> _Early:
        return self._early or _Early([], Totals(diagnosis_names(self._config)), 0.0)

    def whole_details(self, details: TokenDetails) -> TokenDetails:
        """Return all ranks' details merged on rank 0, `details` on the others."""
        parts = self._ranks.gathered(details)
        return TokenDetails.merged(parts) if parts else details

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

        def loss_of(logprob_C: Tensor, chunk: slice) -> Tensor:
            if micro.gradient_R is not None:
                return (micro.gradient_R[chunk] * logprob_C).sum()
            chunk_inputs = inputs[chunk]
            return (token_losses(logprob_C, chunk_inputs, config) * chunk_inputs.weight_R).sum()

        if micro.needs_grad:
            logprob_R, entropy_R, divergence_R = self._backward(micro, loss_of)
        else:
            logprob_R, entropy_R = self._policy.score(micro.row)
            divergence_R = None
        progress.advance()
        of_critic = {} if self._critic is None else self._critic.add_gradient(micro, config)
        if micro.is_empty:
            return
        sums = diagnose(logprob_R, entropy_R, inputs, config) | of_critic
        if divergence_R is not None:
            sums[DIVERGENCE] = divergence_R.sum()
            weighted = config.distillation.weight * inputs.weight_R * divergence_R
            sums["loss"] = sums["loss"] + weighted.sum()
        sums |= clip_extremes(logprob_R, inputs, config)
        if is_first_pass:
            current_R = logprob_R if inputs.proximal_R is None else inputs.proximal_R
            kl, max_ratio = mismatch(current_R, inputs.behaviour_R)
            sums |= {"off_policy/mismatch_kl": kl, "off_policy/max_ratio": max_ratio}
            if details is not None:
                details.add_logprobs(micro.row, current_R)
        totals.add(sums, micro.row, is_first_pass=is_first_pass)
        if details is not None:
            details.add_flags(micro, logprob_R)

    def _backward(self, micro: MicroBatch, loss_of: LossOf) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return a micro-batch's scores and, if that is in the loss, a teacher's divergence."""
        config, weight_R = self._config, micro.inputs.weight_R
        bonus_R = config.entropy_coef * weight_R if config.entropy_coef > 0.0 else None
        if not config.distillation.is_divergence:
            return *self._policy.backward(micro.row, loss_of, bonus_R), None
        distillation = config.distillation
        found: list[Tensor] = []

        def taught(logits: Logits) -> tuple[Tensor, Tensor, Tensor]:
            def gradient_of(chunk: slice, x_CV: Tensor) -> Tensor:
                divergence_C, gradient_CV = divergence(x_CV, logits(chunk), distillation)
                found.append(divergence_C)
                return gradient_CV.mul_(distillation.weight * weight_R[chunk, None])

            scores = self._policy.backward(micro.row, loss_of, bonus_R, gradient_of)
            return *scores, torch.cat(found)

        assert isinstance(self._teacher, ModelTeacher)
        return self._teacher.beside(micro.for_teacher, taught)

    def _advantages(self, batch: Sequence[Sample]) -> Advantages:
        """Return the advantages of a batch: those of its responses, for each of their samples."""
        config, responses = self._config, first_sequences(batch)
        most = self._rollout.max_completion_length
        lengths = [len(s.completion_ids) for s in responses]
        reward_N = shaped_rewards([s.reward for s in responses], lengths, config, most)
        kl = self._scoring.kl(batch, config) if config.kl_in == "reward" else None
        penalties = None if kl is None else [config.beta * each for each in kl]
        mean_kl = (
            None if kl is None else float(np.concatenate(kl).sum() / max(sum(map(len, kl)), 1))
        )
        if config.discounts:  # responses are not compared within a group
            given = reward_N, penalties
            if self._critic is not None:
                of_tokens = self._critic.advantages(batch, *given, self._scoring, config)
            else:
                zeros = [np.zeros(length) for length in lengths_in_loss(batch, config)]
                rewards = token_rewards(*given, zeros, owners(batch))
                of_tokens = estimates(rewards, zeros, config, owners(batch)).advantages
            of_tokens = [config.distillation.reward_weight * each for each in of_tokens]
            return Advantages(reward_N, float(is_flat(reward_N.tolist())), of_tokens, mean_kl)
        if penalties is not None:
            reward_N = reward_N - by_response(batch, [each.sum() for each in penalties])
        groups, components = [s.group for s in responses], [s.components for s in responses]
        lengths, weights = response_lengths(batch, config), batch[0].weights
        found = batch_advantages(reward_N, groups, lengths, config, components, weights)
        values = found.values * config.distillation.reward_weight
        return replace(found, values=values[owners(batch)], kl=mean_kl)
